// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/ops/arange.h>

#include "lamina/remote/protocol.h"

namespace lamina::remote::testing {

inline base::CallId call(std::int64_t first) {
  return {base::Rank(first), base::Step(-first), base::Microbatch(first + 2), first + 3};
}

inline void fill(Request& request) {
  request.call = call(1);
  request.module = base::ModuleId(5);
  request.deliveries = {{7, base::Rank(8), call(9)}, {}};
  request.released = {{call(13), true}, {{}, false}};
  request.expected = 0xfedcba9876543210;
  request.after = 7;
}

// Messages with something in every field.
inline ForwardRequest forward_request() {
  ForwardRequest request;
  fill(request);
  request.state = {"modes", {1ull << 63, 7}, std::string("\0face", 5), "flags"};
  request.news = std::string("\0news", 5);
  request.arguments = value::Tuple{{at::arange(3), "text"}};
  return request;
}

inline BackwardRequest backward_request() {
  BackwardRequest request;
  fill(request);
  request.forward = -3;
  request.options = {true, false, {4, 5}, {}};
  request.flags = "flags";
  request.gradients = value::List{{at::Tensor(), value::List{{at::arange(2), value::Reference{call(20)}}}}};
  return request;
}

inline Ask ask() { return {call(1), {2, base::Rank(3), call(4)}}; }

inline Values values() { return {{call(1), call(5)}, Tensors{at::arange(2), at::arange(3)}}; }

inline Answer answer() {
  Answer answer{call(1), false, std::string("\0note", 5)};
  answer.names = {call(5), call(9)};
  answer.outputs = {at::arange(2), at::Tensor()};
  return answer;
}

inline value::Failure failure() { return {"ValueError", "wrong", "a traceback", base::Rank(3), {}}; }

// Every kind of message.
inline std::vector<transport::Message> messages() {
  Answer raised{call(1)}, waited{call(1)};
  raised.failure = failure();
  waited.result = "result";
  return {to_message(forward_request()),
          to_message(backward_request()),
          to_message(ask()),
          to_message(values()),
          to_message(answer()),
          to_message(std::move(raised)),
          to_message(std::move(waited)),
          to_message(Values{{call(1)}, failure()})};
}

// Reads a message as what its kind says.
inline void read(transport::Message&& message) {
  if (message.kind == kForward) to_forward_request(std::move(message));
  if (message.kind == kBackward) to_backward_request(std::move(message));
  if (message.kind == kAsk) to_ask(message);
  if (message.kind == kValues) to_values(std::move(message));
  if (message.kind == kResult || message.kind == kError) to_answer(std::move(message));
}

}  // namespace lamina::remote::testing
