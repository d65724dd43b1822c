// SPDX-License-Identifier: Apache-2.0
#include "lamina/job_checkpoint/record_job.h"

#include <ATen/ops/mul.h>

#include <map>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "lamina/base/str.h"
#include "lamina/job_checkpoint/generators.h"
#include "lamina/job_checkpoint/optimizer_states.h"
#include "lamina/job_checkpoint/parts.h"
#include "lamina/job_checkpoint/save_list.h"
#include "lamina/runtime/rng_streams.h"
#include "lamina/value/guarded.h"

namespace lamina::job_checkpoint {

using verification::RunRecorder;
using Held = RunRecorder::Held;
using Recorded = std::vector<std::pair<digests::RecordedKind, Held>>;

namespace {

// Takes those of the elements that count, and their place in the whole: of a slice the whole.
Held held(std::string name, const at::Tensor& elements, const Parts::Piece& piece, const Parts& parts) {
  if (piece.slicing) return {std::move(name), parts.whole_of(piece, elements), {piece.shape, 0}};
  const value::Unguarded own_work;
  const auto count = piece.region.end - piece.region.begin;
  auto counting = elements.numel() == count ? elements.detach() : elements.detach().flatten().narrow(0, 0, count);
  return {std::move(name), std::move(counting), {piece.shape, piece.region.begin}};
}

void add_model(const JobAccess& job, const Parts& parts, Recorded& state) {
  for (const auto* row : job.table().here()) {
    const auto kind = row->layout.buffer ? digests::RecordedKind::kBuffer : digests::RecordedKind::kParameter;
    state.emplace_back(kind, held(row->layout.name, held_here(job, row->tensor), parts.of_row(*row), parts));
  }
}

void add_optimizer(int number, OptimizerAccess& optimizer, const Parts& parts, Recorded& state) {
  const auto& locals = optimizer.engine().parameters();
  for_each_state(
      number, optimizer,
      [&](const StateName& name, const at::Tensor& local, const at::Tensor& value) {
        const bool is_master = name.state.empty();
        const auto piece = is_master ? parts.of_local(local, name.parameter)
                                     : parts.of_state(locals, local, name.parameter, value.sizes());
        const auto word = is_master ? "master" : name.state;
        state.emplace_back(digests::RecordedKind::kState,
                           held(base::str(name.parameter, " ", word), value, piece, parts));
      },
      /*skips_others=*/true);
}

// The options of a group of an optimizer, by name, in words: see [Note: options].
std::map<std::string, std::string> options_of(const distributed_optimizer::UserOptimizer& user, std::size_t group) {
  std::map<std::string, std::string> options;
  std::istringstream lines(user.options(/*counts=*/false));
  const std::string of_group = base::str(" of group ", group, " = ");
  for (std::string line; std::getline(lines, line);) {
    const auto at = line.find(of_group);
    if (at != std::string::npos) options[line.substr(0, at)] = line.substr(at + of_group.size());
  }
  return options;
}

}  // namespace

void record_updates(distributed_optimizer::Optimizer& optimizer, const collective::Ranks& ranks,
                    std::shared_ptr<RunRecorder> recorder) {
  if (!recorder->writes()) return;
  optimizer.clip_as_shards();
  optimizer.when_updated(
      [ranks, recorder = std::move(recorder)](const auto& user, const auto& groups, const auto* table, double factor) {
        if (table == nullptr) return;
        const Parts parts(ranks, *table);
        std::vector<Held> gradients;
        for (std::size_t number = 0; number < groups.size(); ++number) {
          for (const auto& [name, given, parameter, local] : groups[number]) {
            if (local.defined() && recorder->looked_at().contains(name)) {
              recorder->see_options(name, options_of(user, number));
            }
            if (!local.defined() || !local.grad().defined()) continue;
            const auto gradient = factor == 1 ? local.grad() : local.grad().to(at::kDouble).mul(factor);
            gradients.push_back(held(name, gradient, parts.of_local(local, name), parts));
          }
        }
        recorder->see_update(gradients);
      });
}

bool JobRecording::begin_step(JobAccess& job) {
  const bool is_over = record_news(job);
  if (!is_over) recorder_->begin_step();
  return is_over;
}

bool JobRecording::begin_call(JobAccess& job) { return !runtime::in_step() && record_news(job); }

bool JobRecording::record_news(JobAccess& job) {
  const bool is_first = !std::exchange(has_begun_, true), has_news = recorder_->has_news();
  if (is_first || has_news) record_generators(job);
  if (!has_model_ || has_news) record_model(job);
  return recorder_->is_over();
}

// With several partitions that is in the first step, else long before it: a checkpoint may be loaded until then.
void JobRecording::note_cut(JobAccess& job) {
  if (job.ranks().topology.size(topology::kPartitions) > 1) record_model(job);
}

void JobRecording::see_results(std::span<const std::vector<at::Tensor>> results) {
  for (std::size_t i = 0; i < results.size(); ++i) {
    recorder_->see_result(base::Microbatch(static_cast<int>(i)), results[i]);
  }
}

void JobRecording::end_step() { recorder_->end_step(); }

void JobRecording::before_update(JobAccess& job) {
  if (!job.has_model() || !job.is_cut()) return;
  const Parts parts(job.ranks(), job.table());
  std::vector<Held> gradients;
  for (const auto* row : job.table().here()) {
    const auto gradient = held_here(job, row->tensor).grad();
    if (gradient.defined()) gradients.push_back(held(row->layout.name, gradient, parts.of_row(*row), parts));
  }
  recorder_->see_update(gradients);
}

void JobRecording::end(JobAccess& job) {
  if (recorder_->has_news()) record_news(job);
  recorder_->end();
}

void JobRecording::record_model(JobAccess& job) {
  if (!job.has_model() || !job.is_cut()) return;
  const Parts parts(job.ranks(), job.table());
  Recorded state;
  add_model(job, parts, state);
  int number = 0;
  for (auto* optimizer : job.optimizers()) add_optimizer(number++, *optimizer, parts, state);
  recorder_->see_state(state);
  has_model_ = true;
}

void JobRecording::record_generators(JobAccess& job) {
  if (!job.steps().leads()) return;
  const model::ParameterTable none(std::vector<model::Parameter>(), base::Partition(0), 1);
  const Parts parts(job.ranks(), none);
  SaveList list(parts);
  add_generators(job, list);
  Recorded state;
  for (std::int64_t number = 0; const auto& part : list.take()) {
    const auto& elements = part.elements;
    state.emplace_back(digests::RecordedKind::kGenerator,
                       Held{base::str(number++), elements, {elements.sizes().vec(), 0}});
  }
  recorder_->see_state(state);
}

}  // namespace lamina::job_checkpoint
