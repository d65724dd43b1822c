// SPDX-License-Identifier: Apache-2.0
#include "lamina/session/graph_links.h"

#include <ATen/ops/from_blob.h>

#include <utility>

#include "lamina/value/bytes.h"

namespace lamina::session {
namespace {

using transport::Message;

// The memory is only read: what sends it copies it, or has the receiver copy it.
at::Tensor bytes_of(const graph::TensorBytes& value) {
  return at::from_blob(const_cast<void*>(value.data.get()), {static_cast<std::int64_t>(value.size_bytes)}, at::kByte);
}

Message to_message(transport::Kind kind, const graph::ValueName& name, const graph::TensorBytes& value) {
  value::Writer out;
  out.put(name.graph);
  out.put<std::uint8_t>(name.pass == graph::Direction::kBackward);
  out.put<std::int64_t>(name.value);
  out.put(value.type);
  out.put<std::uint64_t>(value.shape.size());
  for (const auto size : value.shape) out.put(size);
  return {kind, {name.from, name.step, name.microbatch, name.value}, out.take(), bytes_of(value)};
}

std::pair<graph::ValueName, graph::TensorBytes> to_value(const Message& message) {
  value::Reader in(message.fields);
  graph::ValueName name{.step = message.call.step, .microbatch = message.call.microbatch, .from = message.call.origin};
  name.graph = in.get<std::int64_t>();
  name.pass = in.get<std::uint8_t>() != 0 ? graph::Direction::kBackward : graph::Direction::kForward;
  name.value = static_cast<int>(in.get<std::int64_t>());
  graph::TensorBytes value{.type = in.get<std::int32_t>()};
  const auto count = in.get_count();
  for (std::size_t i = 0; i < count; ++i) value.shape.push_back(in.get<std::int64_t>());
  in.expect_end();
  const auto kept = std::make_shared<const at::Tensor>(message.body.as<at::Tensor>());
  value.data = {kept, kept->const_data_ptr()};
  value.size_bytes = kept->nbytes();
  return {name, std::move(value)};
}

// Takes no schedule, as what copies do has no turns. The timeline has the steps of the model.
graph::BorderOptions of_copies(graph::BorderOptions options) {
  options.schedule = "simple";
  options.recorder = nullptr;
  options.of = "copies of the model";
  return options;
}

}  // namespace

GraphLinks::GraphLinks(const graph::BorderOptions& options, std::vector<base::Rank> one_copy,
                       std::vector<base::Rank> copies, messaging::Messenger& messenger)
    : one_copy_(options, std::move(one_copy), kGraphValue, kGraphFailure, messenger),
      copies_(of_copies(options), std::move(copies), kCopiesValue, kCopiesFailure, messenger) {}

graph::Border& GraphLinks::border(graph::Among among) {
  return among == graph::Among::kCopies ? copies_.border() : one_copy_.border();
}

GraphLinks::Way::Way(graph::BorderOptions options, std::vector<base::Rank> ranks, transport::Kind value,
                     transport::Kind failure, messaging::Messenger& messenger)
    : messenger_(messenger),
      ranks_(std::move(ranks)),
      value_(value),
      failure_(failure),
      border_(std::move(options), *this) {
  messenger.handlers().on(value, [this](Message&& message) {
    auto [name, value] = to_value(message);
    border_.receive(name, std::move(value));
  });
  messenger.handlers().on(failure,
                          [this](Message&& message) { border_.hear_failure(message.call.step, message.fields); });
  messenger.watch({[](base::Rank) { return std::string(); }, [this](const base::Loss& loss) { border_.lose(loss); }});
}

void GraphLinks::Way::send(base::Rank to, const graph::ValueName& name, const graph::TensorBytes& value) {
  messenger_.transport().send(to, to_message(value_, name, value));
}

void GraphLinks::Way::tell_failure(base::Step step, const std::string& why) {
  for (const base::Rank rank : ranks_) {
    if (rank == messenger_.rank()) continue;
    try {
      messenger_.transport().tell(rank,
                                  {failure_, {messenger_.rank(), step, transport::kWholeStep, 0}, why, value::Value()});
    } catch (const base::Error&) {  // of a rank that is lost
    }
  }
}

}  // namespace lamina::session
