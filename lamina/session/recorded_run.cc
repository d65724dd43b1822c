// SPDX-License-Identifier: Apache-2.0
#include "lamina/session/recorded_run.h"

#include <optional>
#include <utility>

#include "lamina/verification/run_recorder.h"

namespace lamina::session {
namespace {

// The part of a row that is here, with its gradient.
struct Held {
  at::Tensor value;
  at::Tensor gradient;
  verification::PartOf part;
};

at::Tensor first_of(const at::Tensor& tensor, std::int64_t elements) {
  return tensor.defined() ? tensor.detach().flatten().narrow(0, 0, elements) : at::Tensor();
}

Held held(const model::Parameter& row, sharding::Sharding* sharding) {
  const auto number = sharding == nullptr ? std::nullopt : sharding->find(row.tensor);
  if (!number) return {row.tensor, row.tensor.grad(), {row.layout.shape, 0}};
  const auto shard = sharding->shard(*number);
  const auto& share = sharding->share(*number);  // what else the shard has pads it
  return {first_of(shard, share.count()), first_of(shard.grad(), share.count()), {row.layout.shape, share.begin}};
}

}  // namespace

void record_modules(Session& session, const std::vector<std::string>& names) {
  if (const auto& recorder = session.run_recorder()) session.job().call_hooks().add(recorder, names);
}

void record_model(Session& session, const model::ParameterTable& table, sharding::Sharding* sharding) {
  const auto& recorder = session.run_recorder();
  if (!recorder) return;
  for (const auto* row : table.here()) {
    const auto here = held(*row, sharding);
    const auto kind = row->layout.buffer ? digests::Kind::kBuffer : digests::Kind::kParameter;
    recorder->see(kind, row->layout.name, here.value, here.part);
  }
}

void record_step(Session& session, const model::ParameterTable& table, sharding::Sharding* sharding) {
  const auto& recorder = session.run_recorder();
  if (!recorder) return;
  for (const auto* row : table.here()) {
    if (row->layout.buffer) continue;
    const auto here = held(*row, sharding);
    if (here.gradient.defined()) recorder->see(digests::Kind::kGradient, row->layout.name, here.gradient, here.part);
  }
  recorder->end_step();
}

}  // namespace lamina::session
