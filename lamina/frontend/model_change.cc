// SPDX-License-Identifier: Apache-2.0
#include <torch/nn/module.h>

#include <utility>

#include "lamina/frontend/current.h"
#include "lamina/frontend/model.h"
#include "lamina/model/make_table.h"
#include "lamina/session/change.h"

// The part of a model that goes over to another layout: see [Note: change of layout].
namespace lamina::frontend {

Model::Model(const Model& before, Current& job) : Model(job, before.tree_.root(), before.options_) {
  trace_ = before.trace_;
  slice();
  join_copies();
}

void Model::tell(session::ChangingJob& job) const {
  job.has_model = true;
  job.is_cut = partitioned();
  job.has_hook = reducer_ != nullptr && reducer_->hooked();
  job.why_not_slices = [this](const config::Config& config) {
    return why_not_slices(*tree_.root(), config, layers_.get());
  };
  job.joins = reducer_ != nullptr && reducer_->joining();
  for (const auto& buffer : tree_.root()->named_buffers()) {
    if (model::is_odd(buffer.value())) job.odd_buffers.push_back(buffer.key());
  }
}

bool Model::has_trace() const { return trace_ && trace_->modules == make_tree().names(); }

value::Value Model::lent_trace() const { return trace_ ? trace_->as_value() : value::Value(); }

void Model::take_trace(const value::Value& trace) {
  if (trace.get_if<value::None>() == nullptr) trace_ = Trace::read(trace);
}

model::Proposal Model::propose_in(const config::Config& config, const plan::KeptPartition& kept) const {
  const auto& world = job_.session->world();
  if (world.rank != base::Rank(0)) return {};
  const TorchModuleTree tree(tree_.root(), !config.auto_partition, slicings_);
  const auto costs = has_trace() ? trace_->costs : std::nullopt;
  return {.plan = model::plan_model(tree, costs, config, world.size, config.partitions, kept), .error = {}, .word = {}};
}

void Model::let_go() {
  if (layers_) layers_->end();
  backwards_.watch({}, /*forgets=*/false);
  if (reducer_) reducer_->let_go();
}

void Model::go_on(std::optional<model::Proposal> proposal) {
  if (proposal || !job_.pipelined()) cut(std::nullopt, std::move(proposal));
}

}  // namespace lamina::frontend
