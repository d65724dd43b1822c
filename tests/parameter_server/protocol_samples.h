// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/ops/arange.h>

#include "lamina/parameter_server/protocol.h"
#include "lamina/value/numbers.h"

namespace lamina::parameter_server::testing {

inline RemoteModule module() {
  const Address address{base::Rank(3), 1ll << 62, 5};
  return {
      address, "net", {{{address.owner, address.job, 7}, "weight", {2, 0, 3}, at::kBFloat16, false}, {address, ""}}};
}

inline Request request(Verb verb, value::Value body) {
  return {verb, base::Rank(1), 2, 1ll << 62, -4, {base::Rank(5), 6}, std::move(body)};
}

// Requests with the bodies of every verb.
inline std::vector<Request> requests() {
  const value::Value gradients = to_list(std::vector<at::Tensor>{at::arange(2), {}});
  return {request(Verb::kFind, "net"),
          request(Verb::kCall, value::Tuple{{std::string("modes\0", 6), value::Tuple{{at::arange(3), "text"}}}}),
          request(Verb::kBackward,
                  value::Tuple{{std::int64_t{9}, true, value::to_list(std::vector<std::int64_t>{0, 1}), gradients}}),
          request(Verb::kOptimizer,
                  value::Tuple{{"SGD", value::List{{0.1, 0.0}}, value::to_list(std::vector<std::int64_t>{1})}}),
          request(Verb::kNorm, {}),
          request(Verb::kStep, value::Tuple{{1.5, value::List{{0.1, 0.0}}}}),
          request(Verb::kShare, "optimizer")};
}

// Every kind of message.
inline std::vector<transport::Message> messages() {
  std::vector<transport::Message> all;
  for (auto& one : requests()) all.push_back(to_message(std::move(one)));
  all.push_back(to_message(Answer{2, to_value(module()), {}}, base::Rank(1)));
  all.push_back(to_message(Answer{2, {}, value::Failure{"ValueError", "wrong", "a traceback", base::Rank(3), {}}},
                           base::Rank(1)));
  all.push_back(to_message(ContextId{base::Rank(5), 6}));
  return all;
}

// Reads a message as what its kind says, and the body of a request as what its verb says.
inline void read(transport::Message&& message) {
  if (message.kind == kContextEnd) to_ended_context(message);
  if (message.kind == kAnswer) {
    if (auto answer = to_answer(std::move(message)); !answer.failure) to_remote_module(answer.body);
    return;
  }
  if (message.kind != kRequest) return;
  auto request = to_request(std::move(message));
  switch (request.verb) {
    case Verb::kFind:
    case Verb::kShare:
      request.body.as<std::string>();
      return;
    case Verb::kCall:
    case Verb::kStep:
      to_parts(std::move(request.body), 2);
      return;
    case Verb::kBackward: {
      auto parts = to_parts(std::move(request.body), 4);
      value::to_numbers(parts[2]);
      to_tensors(parts[3]);
      return;
    }
    case Verb::kOptimizer:
      value::to_numbers(to_parts(std::move(request.body), 3)[2]);
      return;
    case Verb::kNorm:
      return;
  }
}

}  // namespace lamina::parameter_server::testing
