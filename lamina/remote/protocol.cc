// SPDX-License-Identifier: Apache-2.0
#include "lamina/remote/protocol.h"

#include "lamina/base/error.h"
#include "lamina/base/hash.h"
#include "lamina/value/bytes.h"

namespace lamina::remote {

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
  value::List watched;
  for (const auto output : request.options.watched) watched.items.emplace_back(output);
  return value::Tuple{
      {request.forward, request.options.keep_graph, request.options.accumulate, watched, request.gradients}};
}

BackwardRequest to_backward_request(const value::Value& value) {
  const auto& items = value.as<value::Tuple>().items;
  if (items.size() != 5) throw base::FormatError("a backward request without five parts");
  std::vector<std::int64_t> watched;
  for (const auto& output : items[3].as<value::List>().items) watched.push_back(output.as<std::int64_t>());
  return {items[0].as<std::int64_t>(),
          {items[1].as<bool>(), items[2].as<bool>(), std::move(watched)},
          items[4].as<value::List>()};
}

std::string pattern(const Tensors& tensors) {
  std::string made;
  for (const auto& tensor : tensors) made += tensor.defined() ? '1' : '0';
  return made;
}

std::uint64_t fingerprint(const std::string& pattern) { return base::hash64(pattern) | 1; }

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

std::string join_state(const CallState& state) {
  value::Writer out;
  out.put_block(state.modes);
  out.put_block(state.of_face);
  out.put_block(state.flags);
  out.put<std::uint64_t>(state.seeds.size());
  for (const auto seed : state.seeds) out.put(seed);
  return out.take();
}

CallState split_state(std::string_view bytes) {
  value::Reader in(bytes);
  CallState state;
  state.modes = in.get_block();
  state.of_face = in.get_block();
  state.flags = in.get_block();
  state.seeds.resize(in.get_count());
  for (auto& seed : state.seeds) seed = in.get<std::uint64_t>();
  in.expect_end();
  return state;
}

}  // namespace lamina::remote
