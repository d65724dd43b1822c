// SPDX-License-Identifier: Apache-2.0
#include "lamina/job_checkpoint/record_job.h"

#include <ATen/ops/mul.h>

#include <string>
#include <utility>
#include <vector>

#include "lamina/base/str.h"
#include "lamina/job_checkpoint/generators.h"
#include "lamina/job_checkpoint/optimizer_states.h"
#include "lamina/job_checkpoint/parts.h"
#include "lamina/job_checkpoint/save_list.h"

namespace lamina::job_checkpoint {

using verification::RunRecorder;
using Held = RunRecorder::Held;
using Recorded = std::vector<std::pair<digests::Kind, Held>>;

namespace {

// Takes those of the elements that count, and their place in the whole.
Held held(std::string name, const at::Tensor& elements, const Parts::Piece& piece) {
  const auto count = piece.region.end - piece.region.begin;
  auto counting = elements.numel() == count ? elements.detach() : elements.detach().flatten().narrow(0, 0, count);
  return {std::move(name), std::move(counting), {piece.shape, piece.region.begin}};
}

void add_model(const JobAccess& job, const Parts& parts, Recorded& state) {
  for (const auto* row : job.table().here()) {
    const auto kind = row->layout.buffer ? digests::Kind::kBuffer : digests::Kind::kParameter;
    state.emplace_back(kind, held(row->layout.name, held_here(job, row->tensor), parts.of_row(*row)));
  }
}

void add_optimizer(int number, OptimizerAccess& optimizer, const Parts& parts, Recorded& state) {
  const auto& locals = optimizer.engine().parameters();
  for_each_state(number, optimizer, [&](const StateName& name, const at::Tensor& local, const at::Tensor& value) {
    const bool is_master = name.state.empty();
    const auto piece = is_master ? parts.of_local(local, name.parameter)
                                 : parts.of_state(locals, local, name.parameter, value.sizes());
    const auto word = is_master ? "master" : name.state;
    state.emplace_back(digests::Kind::kState, held(base::str(name.parameter, " ", word), value, piece));
  });
}

void add_generators_of(JobAccess& job, const Parts& parts, Recorded& state) {
  if (!job.steps().leads()) return;
  SaveList list(parts);
  add_generators(job, list);
  std::int64_t number = 0;
  for (const auto& part : list.take()) {
    const auto& elements = part.elements;
    state.emplace_back(digests::Kind::kGenerator, Held{base::str(number++), elements, {elements.sizes().vec(), 0}});
  }
}

}  // namespace

void record_state(JobAccess& job, RunRecorder& recorder) {
  if (!job.has_model() || !job.is_cut()) return;
  const Parts parts(job.ranks(), job.table());
  Recorded state;
  add_model(job, parts, state);
  int number = 0;
  for (auto* optimizer : job.optimizers()) add_optimizer(number++, *optimizer, parts, state);
  add_generators_of(job, parts, state);
  recorder.see_state(state);
}

void record_updates(distributed_optimizer::Optimizer& optimizer, const collective::Ranks& ranks,
                    std::shared_ptr<RunRecorder> recorder) {
  optimizer.clip_as_shards();
  optimizer.when_updated([ranks, recorder = std::move(recorder)](const auto& groups, const auto* table, double factor) {
    if (table == nullptr) return;
    const Parts parts(ranks, *table);
    std::vector<Held> gradients;
    for (const auto& group : groups) {
      for (const auto& [name, given, parameter, local] : group) {
        if (!local.defined() || !local.grad().defined()) continue;
        const auto gradient = factor == 1 ? local.grad() : local.grad().to(at::kDouble).mul(factor);
        gradients.push_back(held(name, gradient, parts.of_local(local, name)));
      }
    }
    recorder->see_update(gradients);
  });
}

void record_gradients(JobAccess& job, RunRecorder& recorder) {
  if (!job.has_model() || !job.is_cut()) return;
  const Parts parts(job.ranks(), job.table());
  std::vector<Held> gradients;
  for (const auto* row : job.table().here()) {
    const auto gradient = held_here(job, row->tensor).grad();
    if (gradient.defined()) gradients.push_back(held(row->layout.name, gradient, parts.of_row(*row)));
  }
  recorder.see_update(gradients);
}

}  // namespace lamina::job_checkpoint
