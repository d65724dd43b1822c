// SPDX-License-Identifier: Apache-2.0
#include "lamina/remote/protocol.h"

#include "lamina/base/error.h"
#include "lamina/base/hash.h"
#include "lamina/value/bytes.h"

namespace lamina::remote {
namespace {

using transport::Message;
using value::Reader;
using value::Writer;

constexpr std::size_t kUsualRequest = 512;  // in bytes; a longer one is written all the same
constexpr std::size_t kUsualAnswer = 64;

static_assert(sizeof(Delivery) == 6 * sizeof(std::int64_t), "written as it lies in memory");

void put(Writer& out, std::int64_t number) { out.put(number); }
void put(Writer& out, std::uint64_t number) { out.put(number); }
void put(Writer& out, const base::CallId& call) { out.put(call); }
void put(Writer& out, const Delivery& delivery) { out.put(delivery); }
void put(Writer& out, const Release& release) {
  out.put(release.call);
  out.put<std::uint8_t>(release.graph);
}

void get(Reader& in, std::int64_t& number) { number = in.get<std::int64_t>(); }
void get(Reader& in, std::uint64_t& number) { number = in.get<std::uint64_t>(); }
void get(Reader& in, base::CallId& call) { call = in.get<base::CallId>(); }
void get(Reader& in, Delivery& delivery) { delivery = in.get<Delivery>(); }
void get(Reader& in, Release& release) {
  release.call = in.get<base::CallId>();
  release.graph = in.get<std::uint8_t>() != 0;
}

template <class Item>
void put(Writer& out, const std::vector<Item>& items) {
  out.put<std::uint64_t>(items.size());
  for (const auto& item : items) put(out, item);
}

template <class Item>
void get(Reader& in, std::vector<Item>& items) {
  for (auto left = in.get_count(); left > 0; --left) get(in, items.emplace_back());
}

void put(Writer& out, const Request& request) {
  out.put(request.module);
  put(out, request.deliveries);
  put(out, request.released);
  out.put(request.expected);
  out.put(request.after);
}

void get(Reader& in, Request& request) {
  request.module = in.get<base::ModuleId>();
  get(in, request.deliveries);
  get(in, request.released);
  request.expected = in.get<std::uint64_t>();
  request.after = in.get<std::int64_t>();
}

void put(Writer& out, const CallState& state) {
  out.put_block(state.modes);
  out.put_block(state.of_face);
  out.put_block(state.flags);
  put(out, state.seeds);
}

void get(Reader& in, CallState& state) {
  state.modes = in.get_block();
  state.of_face = in.get_block();
  state.flags = in.get_block();
  get(in, state.seeds);
}

Message made(transport::Kind kind, const base::CallId& call, Writer& fields, value::Value body) {
  return {kind, call, fields.take(), std::move(body)};
}

// As many as there are names for.
Tensors outputs_of(const value::Value& body, const std::vector<base::CallId>& names) {
  auto outputs = to_tensors(body);
  if (outputs.size() != names.size()) throw base::FormatError("a call's outputs are not as many as their names");
  return outputs;
}

}  // namespace

std::string to_bytes(const CallState& state) {
  Writer out(kUsualRequest);
  put(out, state);
  return out.take();
}

Message to_message(ForwardRequest request) {
  Writer out(kUsualRequest);
  put(out, static_cast<const Request&>(request));
  put(out, request.state);
  out.put_block(request.news);
  return made(kForward, request.call, out, std::move(request.arguments));
}

ForwardRequest to_forward_request(Message&& message) {
  ForwardRequest request;
  Reader in(message.fields);
  request.call = message.call;
  get(in, static_cast<Request&>(request));
  get(in, request.state);
  request.news = in.get_block();
  in.expect_end();
  request.arguments = std::move(message.body);
  return request;
}

Message to_message(BackwardRequest request) {
  Writer out(kUsualRequest);
  put(out, static_cast<const Request&>(request));
  out.put(request.forward);
  out.put<std::uint8_t>(request.options.keep_graph);
  out.put<std::uint8_t>(request.options.accumulate);
  put(out, request.options.watched);
  out.put_block(request.flags);
  return made(kBackward, request.call, out, std::move(request.gradients));
}

BackwardRequest to_backward_request(Message&& message) {
  BackwardRequest request;
  Reader in(message.fields);
  request.call = message.call;
  get(in, static_cast<Request&>(request));
  request.forward = in.get<std::int64_t>();
  request.options.keep_graph = in.get<std::uint8_t>() != 0;
  request.options.accumulate = in.get<std::uint8_t>() != 0;
  get(in, request.options.watched);
  request.flags = in.get_block();
  in.expect_end();
  request.gradients = std::move(message.body.as<value::List>());
  return request;
}

Message to_message(const Ask& ask) {
  Writer out(kUsualAnswer);
  out.put(ask.delivery);
  return made(kAsk, ask.call, out, {});
}

Ask to_ask(const Message& message) {
  Reader in(message.fields);
  const Ask ask{message.call, in.get<Delivery>()};
  in.expect_end();
  return ask;
}

Message to_message(Values values) {
  Writer out(kUsualAnswer);
  put(out, values.names);
  const auto* failure = std::get_if<value::Failure>(&values.values);
  return made(kValues, values.names.at(0), out,
              failure != nullptr ? value::to_value(*failure) : to_value(std::get<Tensors>(values.values)));
}

Values to_values(Message&& message) {
  Values values;
  Reader in(message.fields);
  get(in, values.names);
  in.expect_end();
  if (message.body.get_if<value::List>() == nullptr) {
    values.values = value::to_failure(message.body);
  } else {
    values.values = outputs_of(message.body, values.names);
  }
  return values;
}

Message to_message(Answer answer) {
  Writer out(kUsualAnswer);
  out.put<std::uint8_t>(answer.done);
  out.put_block(answer.note);
  put(out, answer.names);
  if (answer.failure) return made(kError, answer.call, out, value::to_value(*answer.failure));
  return made(kResult, answer.call, out, answer.names.empty() ? std::move(answer.result) : to_value(answer.outputs));
}

Answer to_answer(Message&& message) {
  Answer answer;
  Reader in(message.fields);
  answer.call = message.call;
  answer.done = in.get<std::uint8_t>() != 0;
  answer.note = in.get_block();
  get(in, answer.names);
  in.expect_end();
  if (message.kind == kError) {
    answer.failure = value::to_failure(message.body);
  } else if (answer.names.empty()) {
    answer.result = std::move(message.body);
  } else {
    answer.outputs = outputs_of(message.body, answer.names);
  }
  return answer;
}

value::Value to_value(ForwardAnswer answer) {
  return value::Tuple{
      {std::move(answer.outputs), std::move(answer.written), answer.reached, answer.saw_data, answer.views}};
}

ForwardAnswer to_forward_answer(value::Value value) {
  auto& items = value.as<value::Tuple>().items;
  if (items.size() != 5) throw base::FormatError("an answer without five parts");
  return {std::move(items[0]), std::move(items[1].as<value::List>()), items[2].as<std::string>(), items[3].as<bool>(),
          items[4].as<std::string>()};
}

value::Value to_value(const Tensors& tensors) {
  value::List list;
  list.items.reserve(tensors.size());
  for (const auto& tensor : tensors) list.items.emplace_back(tensor);
  return list;
}

Tensors to_tensors(const value::Value& value) {
  const auto& items = value.as<value::List>().items;
  Tensors tensors;
  tensors.reserve(items.size());
  for (const auto& item : items) tensors.push_back(item.as<at::Tensor>());
  return tensors;
}

std::string pattern(const Tensors& tensors) {
  std::string made;
  for (const auto& tensor : tensors) made += tensor.defined() ? '1' : '0';
  return made;
}

std::uint64_t fingerprint(const std::string& pattern) { return base::hash64(pattern) | 1; }

}  // namespace lamina::remote
