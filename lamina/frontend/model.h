// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <source_location>
#include <string>
#include <utility>
#include <vector>

#include "lamina/base/error.h"
#include "lamina/data_parallel/named_tensor.h"
#include "lamina/data_parallel/reducer.h"
#include "lamina/distributed_optimizer/optimizer.h"
#include "lamina/frontend/device_errors.h"
#include "lamina/frontend/first_call.h"
#include "lamina/frontend/module_tree.h"
#include "lamina/frontend/sliced_model.h"
#include "lamina/frontend/trace.h"
#include "lamina/frontend/tracer.h"
#include "lamina/model/cut.h"
#include "lamina/model/gradient_watch.h"
#include "lamina/model/parameter_table.h"
#include "lamina/pipeline/backwards.h"
#include "lamina/pipeline/job.h"
#include "lamina/pipeline/pieces.h"
#include "lamina/plan/kept_partition.h"
#include "lamina/session/plain_values.h"
#include "lamina/sharding/sharding.h"

namespace lamina {

// How a DistributedModel treats gradients. Options of ddp. Gradients are averaged over the replicas after so many
// backward passes, and add up on each until then. About so many MiB travel at a time. Buffers may then get the values
// of the first replica, and gradients may travel while the backward still runs. A pass is a step in which there was a
// backward or, outside of steps, a backward; one that fails on a replica fails on all.
struct ModelOptions {
  bool average_grads_across_microbatches = true;
  int backward_passes_per_step = 1;
  double bucket_cap_mb = 25;
  bool broadcast_buffers = true;
  bool overlapping_allreduce = true;
  bool gradient_as_bucket_view = false;  // averaged gradients are views of the memory in which they travelled
};

// Makes of a bucket what its gradients become: one tensor of their size and type. See data_parallel/buckets.h.
using GradBucket = data_parallel::GradientBucket;
using CommHook = data_parallel::Reduce;

// How replicas leave a loop that joins them; see DistributedModel::join().
struct JoinOptions {
  bool divide_by_initial_world_size = true;  // gradients; else by the number of the replicas that still train
  bool enable = true;                        // false: nothing is joined, for data that is known to be even
  bool throw_on_early_termination = false;   // all replicas throw base::UsageError when the first has left
};

namespace session {
struct ChangingJob;
}

namespace frontend {

struct Current;
class Routing;
class TorchPlainModel;

// The parts that a step runs on.
struct Batch {
  pipeline::Pieces pieces;
  std::vector<std::vector<value::Value>> parts =
      {};                                        // of each argument, one for each microbatch; none of one that is whole
  std::optional<base::UsageError> refused = {};  // the error that the step is
};

using NamedTensors = std::vector<data_parallel::NamedTensor>;

// The job's model: who owns what of it, and what is done with all of it. Everything but a call of it, which needs its
// type (distributed_model.h).
class Model : public std::enable_shared_from_this<Model> {
 public:
  Model(std::shared_ptr<torch::nn::Module> root, ModelOptions options);
  // A model of the same modules in a job of another layout: not cut yet.
  Model(const Model& before, Current& job);
  ~Model();

  const TorchModuleTree& tree() const { return tree_; }
  bool partitioned() const { return table_.has_value(); }
  // Throw base::UsageError before the model is partitioned.
  const model::ParameterTable& table() const;
  // Gives the parameter, or its shard; undefined where another rank owns it.
  at::Tensor held_here(const at::Tensor& parameter) const;
  const std::shared_ptr<sharding::Sharding>& shared_sharding() const { return sharding_; }
  sharding::Sharding* sharding() const { return sharding_.get(); }  // nullptr where nothing is sharded
  void zero_grad(bool set_to_none);
  void scale_by(const std::shared_ptr<optim::LossScale>& scale) { backwards_.scale_by(scale); }
  distributed_optimizer::ModelInUse in_use() const { return {&backwards_, reducer_.get(), steps_}; }
  const std::string& report() const;
  // The partition of each module; throws as table().
  plan::KeptPartition partition() const;
  // True between the backward passes of one reduction.
  bool accumulates() const { return reducer_ != nullptr && reducer_->accumulates(); }

  // Before a call of the model, whose number it returns. Throws base::UsageError outside of steps, with more than one
  // partition, and in a thread that runs no step's body.
  std::int64_t begin_call();
  // Notes that the call has returned; `output`: where it is one tensor.
  void end_call(std::int64_t call, const at::Tensor& output);
  // Calls the model. Where that fails outside of steps the ranks that have the other slices, which wait for what it was
  // to give them, fail, too.
  template <class Call>
  decltype(auto) in_team(const Call& call) {
    try {
      return explained(call);
    } catch (...) {
      give_up(std::current_exception());
      throw;
    }
  }
  // Before a call on ranks that have slices, which compare what they were given as they next compute together.
  bool compares_calls() const { return compares_; }
  void note_call(const value::Value& arguments);
  // True where that is to be followed by first_call(): in the step in which the model is cut it waits until it is, and
  // in one that is compared it is made plainly, too. True of a call whose outputs see_outputs() is to have then.
  bool wants_first_call() const;
  bool first_call(std::optional<Example> example);
  void see_outputs(const value::Value& outputs);

  // Runs one step; see Job::run_step. Cuts the model, the first time.
  pipeline::StepResult run_step(pipeline::StepSpec spec);

  // See DistributedModel.
  void backward(const remote::Tensors& tensors, const remote::Tensors& gradients);
  at::Tensor grad_norm(double norm_type, const std::source_location& site);
  at::Tensor clip_grad_norm(double max_norm, double norm_type, const std::source_location& site);
  // Collective over the pipeline.
  std::vector<std::pair<std::string, at::Tensor>> state(const std::source_location& site);
  void load(const std::map<std::string, at::Tensor>& state);
  void register_comm_hook(CommHook hook);
  void join(const std::function<void()>& loop, const JoinOptions& options);

  // For a change of the layout. What of it does not allow one; if each rank has all of it; if somebody has traced it,
  // which the first rank alone knows.
  void tell(session::ChangingJob& job) const;
  bool is_whole() const { return !partitioned() || table().whole_everywhere(); }
  bool has_trace() const;
  // The trace, for ranks that lack it; None where there is none. Takes it.
  value::Value lent_trace() const;
  void take_trace(const value::Value& trace);
  // The plan of this model in that layout, by the trace that there is; of the first rank alone. Throws what keeps it
  // from being. `kept`: the partition of each module, where it is known.
  model::Proposal propose_in(const config::Config& config, const plan::KeptPartition& kept = {}) const;
  // Holds no parameters in the engine any more, and computes with whole layers.
  void let_go();
  // Cuts it as was proposed: no rank has values yet. Without a proposal it is cut when it must be. Collective over the
  // world.
  void go_on(std::optional<model::Proposal> proposal);

  // From now on a backward is noticed by the gradients that it leaves, in parameters beside the model, too.
  void watch();
  void no_sync(const std::function<void()>& loop);
  // Before gradients are looked at: see Reducer.
  void complete_gradients(const char* what);

 private:
  Model(Current& job, std::shared_ptr<torch::nn::Module> root, ModelOptions options);
  void join_copies();
  void convert();
  void slice();
  void give_up(const std::exception_ptr& error);
  TorchModuleTree make_tree() const;
  class Life;
  void cut(const std::optional<Example>& example, std::optional<model::Proposal> proposal = std::nullopt);
  void keep_order();
  pipeline::StepResult run_pipelined(pipeline::StepSpec spec);
  pipeline::StepResult run_first(pipeline::StepSpec spec);
  void expect_first_call();
  bool is_traced() const;
  void enter(const std::optional<Example>& call, std::shared_ptr<TorchPlainModel> plain);
  model::ParameterTable make_table() const;

  // The first steps, where they are compared: see [Note: step check].
  bool is_checked() const;
  std::vector<session::CheckedTensor> checked(const std::vector<ModuleTensor>& all) const;
  std::vector<ModuleTensor> here(std::vector<ModuleTensor> all) const;
  void look_for_room();
  void take_plain_values();
  std::shared_ptr<TorchPlainModel> plain_model(const std::optional<Example>& call) const;
  void call_plainly(const std::optional<Example>& call, std::shared_ptr<TorchPlainModel> plain);
  void begin_checked_step();
  void end_checked_step(std::int64_t other_backwards);
  void end_checks_if_over();
  pipeline::StepResult run_alone(const pipeline::StepSpec& spec);

  // Replicas: see [Note: backward pass].
  void make_reducer();
  bool training() const;
  NamedTensors own(const std::vector<ModuleTensor>& all) const;  // those of them that are here
  NamedTensors own_parameters() const;                           // and those of optimizers beside the model
  std::shared_ptr<void> whole_values() const;
  at::Tensor detached(const at::Tensor& tensor) const;
  at::IntArrayRef whole_sizes(const at::Tensor& tensor) const;
  at::Tensor slice_here(const at::Tensor& tensor, const at::Tensor& whole) const;  // of what is like all of `tensor`
  at::Tensor norm_of_gradients(double norm_type, const base::Patience& patience);

  Current& job_;
  const ModelOptions options_;
  std::unique_ptr<SlicedLayers> layers_;  // where several ranks have slices
  Slicings slicings_;
  bool compares_ = false;  // what calls are given
  bool is_first_call_ = true;
  TorchModuleTree tree_;
  std::optional<model::Cut> cut_;               // none before the model is cut
  std::optional<model::ParameterTable> table_;  // none before the model is cut
  std::string report_;
  std::optional<Trace> trace_;
  std::unique_ptr<FirstCall> first_call_;
  std::shared_ptr<Routing> routing_;
  pipeline::Backwards backwards_;
  model::GradientWatch slices_;                      // whose gradients are guarded as they come
  std::shared_ptr<data_parallel::Reducer> reducer_;  // with ddp and several replicas
  std::int64_t steps_ = 0;                           // that have ended here
  std::shared_ptr<sharding::Sharding> sharding_;     // once the model is cut, where it is sharded
};

// The job's model as a DistributedModel has it, over changes of the layout: each makes another Model of its modules.
struct HeldModel {
  std::shared_ptr<Model> now;
};

// Makes a model the job's.
std::shared_ptr<HeldModel> set_model(std::shared_ptr<Model> model);

// The job's model; throws base::UsageError where there is none, and inside a step, where `what` is not allowed.
Model& model_outside_step(const std::string& what);

// A step's bodies: with the job's model, if there is one.
pipeline::StepResult run_step(const Batch& batch, const pipeline::Job::Body& body, const base::Call& call);

}  // namespace frontend
}  // namespace lamina
