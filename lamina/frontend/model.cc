// SPDX-License-Identifier: Apache-2.0
#include "lamina/frontend/model.h"

#include <torch/nn/module.h>

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "lamina/base/log.h"
#include "lamina/base/printable.h"
#include "lamina/faces/sayings.h"
#include "lamina/frontend/batch_norms.h"
#include "lamina/frontend/current.h"
#include "lamina/frontend/routing.h"
#include "lamina/job_checkpoint/record_job.h"
#include "lamina/job_checkpoint/resumption.h"
#include "lamina/model/float_types.h"
#include "lamina/model/make_table.h"
#include "lamina/session/model_life.h"
#include "lamina/session/sharding.h"
#include "lamina/session/step_check.h"
#include "lamina/tensor_parallel/team.h"
#include "lamina/value/guarded.h"
#include "lamina/value/released.h"
#include "lamina/verification/run_recorder.h"

namespace lamina::frontend {
namespace {

// Nothing where the model throws: it will do so again in the step, whose error that is.
model::Costs traced(const TorchModuleTree& tree, const Example& example) {
  try {
    const tensor_parallel::Alone alone;  // the others do not run it
    return trace(tree, example);
  } catch (const std::exception& error) {
    base::log_warning(base::str("the model could not be traced (", error.what(), "): ", faces::said("untraced")));
    return std::nullopt;
  }
}

// For whoever wonders why a Partition has no effect.
void tell_of_ignored_scopes(const TorchModuleTree& tree) {
  int count = 0;
  for (int node = 0; node < tree.size(); ++node) {
    const RegisteredChild* known = find_child(tree.module(node).get());
    if (known != nullptr && known->scope) ++count;
  }
  if (count == 0) return;
  base::log_warning(faces::said("ignored-scopes", count, "became a Child while a Partition lived"));
}

}  // namespace

Model::Model(Current& job, std::shared_ptr<torch::nn::Module> root, ModelOptions options)
    : job_(job),
      options_(options),
      tree_(std::move(root), !job_.session->config().auto_partition),
      backwards_(job_.session->job(), options.average_grads_across_microbatches),
      slices_([](const at::Tensor& parameter) { value::guard_gradient(parameter.grad(), parameter); }) {}

Model::Model(std::shared_ptr<torch::nn::Module> root, ModelOptions options)
    : Model(outside_step("DistributedModel()"), std::move(root), options) {
  if (job_.model != nullptr) {
    throw faces::refusal("model-twice");
  }
  if (options.backward_passes_per_step < 1) {
    throw faces::refusal("not-a-count", "backward_passes_per_step", options.backward_passes_per_step);
  }
  if (!(options.bucket_cap_mb > 0) || !std::isfinite(options.bucket_cap_mb)) {
    throw faces::refusal("not-positive", "bucket_cap_mb", options.bucket_cap_mb);
  }
  convert();
  slice();
  if (job_.check != nullptr) backwards_.count_others(true);
  join_copies();
  if (!job_.pipelined()) cut(std::nullopt);
}

Model::~Model() = default;

void Model::slice() {
  layers_ = slice_model(*tree_.root(), *job_.session);
  if (layers_) slicings_ = layers_->slicings();
  if (!slicings_.empty()) tree_ = make_tree();
  compares_ = !slicings_.empty();
}

// Is the job's model, whose copies average their gradients.
void Model::join_copies() {
  const auto& session = *job_.session;
  backwards_.scale_by(job_.loss_scale);
  if (const int replicas = session.topology().size(topology::kReplicas); replicas > 1) {
    if (session.config().ddp) {
      make_reducer();
      session::order_turns(*job_.session);
    } else if (session.world().rank == base::Rank(0)) {
      base::log_warning(faces::said("copies-apart", replicas));
    }
  }
}

// Gives parameters and buffers of floating-point numbers the type that the configuration says.
void Model::convert() {
  const auto types = model::float_types(job_.session->config());
  const auto give = [](std::vector<at::Tensor> tensors, std::optional<at::ScalarType> type) {
    for (auto& tensor : tensors) {
      if (type && tensor.is_floating_point()) tensor.set_data(tensor.detach().to(*type));
    }
  };
  give(tree_.root()->parameters(), types.parameters);
  give(tree_.root()->buffers(), types.buffers);
}

TorchModuleTree Model::make_tree() const { return {tree_.root(), !job_.session->config().auto_partition, slicings_}; }

const model::ParameterTable& Model::table() const {
  if (!partitioned()) throw faces::refusal("not-cut", "nothing is local");
  return *table_;
}

const std::string& Model::report() const {
  if (!partitioned()) throw faces::refusal("not-cut", "there is no report");
  return report_;
}

plan::KeptPartition Model::partition() const {
  if (!partitioned()) throw faces::refusal("not-cut", "there is no report");
  plan::KeptPartition owners;
  for (int node = 0; node < tree_.size(); ++node) owners[tree_.nodes()[node].name] = cut_->owners()[node];
  return owners;
}

// Cutting.

// Lends this face to the cut of its model: see [Note: life of a model].
class Model::Life : public session::ModelFace {
 public:
  // With a proposal no rank has values before load().
  Life(Model& model, const std::optional<Example>& example, std::optional<model::Proposal> proposal)
      : model_(model), job_(model.job_), example_(example), proposal_(std::move(proposal)) {}

  std::vector<messaging::Argument> arguments() const override {
    using messaging::shown;
    const auto& options = model_.options_;
    return {{"backward_passes_per_step", base::str(options.backward_passes_per_step)},
            {"overlapping_allreduce", shown(options.overlapping_allreduce)},
            {"average_grads_across_microbatches", shown(options.average_grads_across_microbatches)},
            {"bucket_cap_mb", base::str(options.bucket_cap_mb)},
            {"broadcast_buffers", shown(options.broadcast_buffers)},
            {"gradient_as_bucket_view", shown(options.gradient_as_bucket_view)}};
  }
  model::Proposal propose() override {
    auto& session = *job_.session;
    model_.tree_ = model_.make_tree();  // what was said of its modules by now counts
    if (proposal_) return *proposal_;
    if (session.world().rank != base::Rank(0)) return {};
    model::Proposal proposal;
    try {
      if (example_) model_.trace_ = Trace{model_.tree_.names(), traced(model_.tree_, *example_)};
      const auto costs = example_ ? model_.trace_->costs : std::nullopt;
      if (session.config().auto_partition) tell_of_ignored_scopes(model_.tree_);
      const auto kept = job_.waiting ? job_.waiting->partition() : plan::KeptPartition();
      const bool is_alone = session.run_recorder() != nullptr && session.run_recorder()->is_collapsed();
      proposal.plan = model::plan_model(model_.tree_, costs, session.config(), is_alone ? 1 : session.world().size,
                                        session.topology().size(topology::kPartitions), kept);
    } catch (const std::exception& wrong) {
      proposal.error = wrong.what();
    }
    return proposal;
  }
  bool values_follow() const override { return proposal_.has_value(); }
  const model::ModuleTree& tree() const override { return model_.tree_; }
  void take_cut(const model::Agreed& agreed) override {
    model_.cut_ = agreed.cut;
    model_.report_ = agreed.table;
    const bool tells = job_.session->world().rank == base::Rank(0) && job_.pipelined();
    if (tells && base::says(base::Level::kInfo)) std::fputs(base::printable(model_.report_).c_str(), stderr);
    model_.table_ = model_.make_table();
  }
  const model::ParameterTable& table() override { return model_.table(); }
  model::ValueHooks value_hooks() override {
    const auto why = [&session = *job_.session](const model::Parameter& row) {
      const auto partition = row.layout.partition;
      return base::str(row.layout.name, " lives in partition ", partition, " on rank ", session.owner(partition),
                       "; it was used on rank ", session.world().rank,
                       ": call its module as a lamina::Child, or place its user in the same partition with "
                       "set_partition. What concerns all parameters, such as an average, a penalty or a save, is done "
                       "between steps by the DistributedModel, and not by the module that it wraps: its "
                       "local_parameters() has those that are here, its state_dict() all values on every rank");
    };
    return {nullptr, why};
  }
  void take_values(std::shared_ptr<sharding::Sharding> sharding) override {
    model_.sharding_ = std::move(sharding);
    if (model_.sharding_ && model_.reducer_) model_.reducer_->set_sharded(model_.sharding_);
  }
  void trim_optimizers() override {
    for (const auto& weak : job_.callbacks) {
      if (const auto callback = weak.lock()) (*callback)();
    }
  }
  void watch() override { model_.watch(); }
  void route() override {
    model_.routing_ = std::make_shared<Routing>(model_.tree_, *model_.cut_, *job_.session);
    set_router(model_.routing_.get());
  }
  void load() override {
    if (const auto waiting = std::exchange(job_.waiting, nullptr)) waiting->load();
  }
  void settle() override {
    if (job_.pipelined()) model_.keep_order();
  }

 private:
  Model& model_;
  Current& job_;
  const std::optional<Example>& example_;
  const std::optional<model::Proposal> proposal_;
};

void Model::cut(const std::optional<Example>& example, std::optional<model::Proposal> proposal) {
  Life life(*this, example, std::move(proposal));
  session::begin_life(*job_.session, life);
  if (job_.recording != nullptr) job_.recording->note_cut(*job_.lend());
}

void Model::keep_order() {
  auto& job = job_.session->job();
  const auto statistics = batch_norms(*tree_.root());
  if (job_.session->config().deterministic_server) {
    remote::Tensors parameters;
    for (const auto& held : tree_.parameters()) {
      if (table().is_here(held.tensor)) parameters.push_back(held.tensor);
    }
    const auto is_theirs = [&](const ModuleTensor& buffer) {
      return std::ranges::any_of(statistics, [&](const runtime::BatchNorm& module) {
        return buffer.tensor.is_same(module.mean) || buffer.tensor.is_same(module.var) ||
               buffer.tensor.is_same(module.count);
      });
    };
    job.set_order(std::move(parameters), !std::ranges::all_of(tree_.buffers(), is_theirs));
  }
  std::vector<runtime::BatchNorm> here;
  std::ranges::copy_if(statistics, std::back_inserter(here),
                       [](const auto& module) { return !value::is_released(module.mean); });
  job.set_statistics(std::move(here));
}

model::ParameterTable Model::make_table() const {
  using topology::Group;
  std::vector<model::NamedTensor> tensors;
  for (const auto& held : tree_.parameters()) {
    tensors.push_back({held.name, held.tensor, /*buffer=*/false});
    const auto slicing = slicings_.find(held.tensor.unsafeGetTensorImpl());
    if (slicing != slicings_.end()) tensors.back().slicing = slicing->second;
  }
  for (const auto& held : tree_.buffers()) tensors.push_back({held.name, held.tensor, /*buffer=*/true});
  const auto& session = *job_.session;
  const auto& topology = session.topology();
  return model::make_table(topology, session.config(), *cut_, tensors,
                           {topology.index(Group::kTp, session.world().rank), topology.size(Group::kTp)});
}

}  // namespace lamina::frontend
