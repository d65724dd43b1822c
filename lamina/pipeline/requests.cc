// SPDX-License-Identifier: Apache-2.0
#include "lamina/pipeline/requests.h"

#include <functional>

#include "lamina/base/error.h"
#include "lamina/value/bytes.h"

namespace lamina::pipeline {

value::Value to_value(const Tensors& tensors) {
  value::List list;
  for (const auto& tensor : tensors) list.items.emplace_back(tensor);
  return list;
}

Tensors to_tensors(const value::Value& value) {
  Tensors tensors;
  for (const auto& item : value.as<value::List>().items) tensors.push_back(item.as<at::Tensor>());
  return tensors;
}

value::Value to_value(const BackwardRequest& request) {
  return value::Tuple{{request.forward, request.keep_graph, request.gradients}};
}

BackwardRequest to_backward_request(const value::Value& value) {
  const auto& items = value.as<value::Tuple>().items;
  if (items.size() != 3) throw base::FormatError("a backward request without three parts");
  return {items[0].as<std::int64_t>(), items[1].as<bool>(), items[2].as<value::List>()};
}

std::string pattern(const Tensors& tensors) {
  std::string made;
  for (const auto& tensor : tensors) made += tensor.defined() ? '1' : '0';
  return made;
}

std::uint64_t fingerprint(const std::string& pattern) { return std::hash<std::string>{}(pattern) | 1; }

value::Value to_value(ForwardAnswer answer) {
  return value::Tuple{{std::move(answer.outputs), std::move(answer.written), answer.saw_data}};
}

ForwardAnswer to_forward_answer(value::Value value) {
  auto& items = value.as<value::Tuple>().items;
  if (items.size() != 3) throw base::FormatError("an answer without three parts");
  return {std::move(items[0]), std::move(items[1].as<value::List>()), items[2].as<bool>()};
}

std::string join_state(const std::string& modes, const std::string& of_face) {
  value::Writer out;
  out.put_block(modes);
  out.put_block(of_face);
  return out.take();
}

std::pair<std::string, std::string> split_state(std::string_view state) {
  value::Reader in(state);
  std::string modes(in.get_block()), of_face(in.get_block());
  in.expect_end();
  return {std::move(modes), std::move(of_face)};
}

}  // namespace lamina::pipeline
