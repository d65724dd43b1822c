// SPDX-License-Identifier: Apache-2.0
#include "lamina/parameter_server/protocol.h"

#include "lamina/base/error.h"
#include "lamina/base/str.h"
#include "lamina/value/numbers.h"

namespace lamina::parameter_server {
namespace {

using base::FormatError;
using transport::Message;
using value::List;
using value::Tuple;
using value::Value;

base::CallId named(base::Rank rank, std::int64_t number) {
  return {rank, transport::kNoStep, transport::kWholeStep, number};
}

std::int64_t to_number(const Value& value) { return value.as<std::int64_t>(); }

Value to_value(const RemoteParameter& parameter) {
  return Tuple{{parameter.address.number, parameter.name, value::to_list(parameter.sizes), parameter.dtype,
                parameter.requires_grad}};
}

RemoteParameter to_parameter(const Value& value, const Address& module) {
  auto parts = to_parts(Value(value), 5);
  return {{module.owner, module.job, to_number(parts[0])},
          parts[1].as<std::string>(),
          value::to_numbers(parts[2]),
          parts[3].as<at::ScalarType>(),
          parts[4].as<bool>()};
}

}  // namespace

std::string RemoteModule::label() const { return name.empty() ? base::str("module ", address.number) : name; }

Value to_value(const RemoteModule& module) {
  List parameters;
  for (const auto& parameter : module.parameters) parameters.items.push_back(to_value(parameter));
  return Tuple{
      {module.address.owner.value, module.address.job, module.address.number, module.name, std::move(parameters)}};
}

RemoteModule to_remote_module(const Value& value) {
  auto parts = to_parts(Value(value), 5);
  RemoteModule module{
      {base::Rank(to_number(parts[0])), to_number(parts[1]), to_number(parts[2])}, parts[3].as<std::string>(), {}};
  for (const auto& one : parts[4].as<List>().items) module.parameters.push_back(to_parameter(one, module.address));
  return module;
}

Message to_message(Request request) {
  return {kRequest, named(request.asker, request.number), "",
          Tuple{{static_cast<std::int64_t>(request.verb), request.job, request.subject, request.context.origin.value,
                 request.context.number, std::move(request.body)}}};
}

Request to_request(Message&& message) {
  auto parts = to_parts(std::move(message.body), 6);
  const auto verb = to_number(parts[0]);
  if (verb < 0 || verb >= kVerbs) throw FormatError(base::str("a request to do ", verb));
  return {static_cast<Verb>(verb), message.call.origin, message.call.counter,
          to_number(parts[1]),     to_number(parts[2]), {base::Rank(to_number(parts[3])), to_number(parts[4])},
          std::move(parts[5])};
}

Message to_message(Answer answer, base::Rank asker) {
  const bool failed = answer.failure.has_value();
  return {kAnswer, named(asker, answer.number), "",
          Tuple{{failed, failed ? to_value(*answer.failure) : std::move(answer.body)}}};
}

Answer to_answer(Message&& message) {
  auto parts = to_parts(std::move(message.body), 2);
  Answer answer{message.call.counter, {}, {}};
  if (parts[0].as<bool>()) {
    answer.failure = value::to_failure(parts[1]);
  } else {
    answer.body = std::move(parts[1]);
  }
  return answer;
}

Message to_message(const ContextId& ended) { return {kContextEnd, named(ended.origin, ended.number), "", {}}; }

ContextId to_ended_context(const Message& message) { return {message.call.origin, message.call.counter}; }

std::vector<Value> to_parts(Value&& body, std::size_t count) {
  auto& parts = body.as<Tuple>().items;
  if (parts.size() != count) throw FormatError(base::str("a message of ", parts.size(), " parts, not ", count));
  return std::move(parts);
}

Value to_list(const std::vector<at::Tensor>& tensors) {
  List list;
  for (const auto& tensor : tensors) list.items.push_back(tensor.defined() ? Value(tensor) : Value());
  return list;
}

std::vector<at::Tensor> to_tensors(const Value& list) {
  std::vector<at::Tensor> tensors;
  for (const auto& item : list.as<List>().items) {
    tensors.push_back(item.get_if<value::None>() != nullptr ? at::Tensor() : item.as<at::Tensor>());
  }
  return tensors;
}

}  // namespace lamina::parameter_server
