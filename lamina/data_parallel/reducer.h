// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "lamina/base/error.h"
#include "lamina/base/wait.h"
#include "lamina/collective/group.h"
#include "lamina/data_parallel/group_reduction.h"
#include "lamina/data_parallel/named_tensor.h"
#include "lamina/data_parallel/passes.h"
#include "lamina/data_parallel/sharded_gradients.h"
#include "lamina/model/gradient_watch.h"
#include "lamina/pipeline/job.h"

// [Note: backward pass] A backward pass is one call of a step function in which a backward was called, or, outside step
// functions, one outermost backward that reaches a parameter. All replicas meet in each ([Note: passes]). The gradients
// are averaged after every n-th, until then they accumulate on each replica. An update counts from one again: what has
// accumulated by then is averaged before, and all replicas meet for it.
//
// A backward may be *held back*: its gradients stay where they are until the next pass that averages, and nobody meets
// for it, so that replicas may have different numbers of those.
//
// In the first backward of a step the replicas tell each other how many samples their batches have: see
// [Note: uneven batches]. In a join, between backwards that are held back, and where a hook averages, each counts
// alone.
//
// It is not known of a step that fails whether it would have had a backward: it counts as a pass unless it was entered
// without gradients. Outside step functions a backward that fails is one: at once where the model's own `backward` was
// called, else when the model is called next, if it had reached the model.
//
// [Note: two reductions] Ranks of a TP_GROUP that have batches of their own are replicas of one another. But each has
// other slices, with which it has computed for the batches of all: the gradient of a slice is a mean over these, of the
// *scaled batch*. Its mean is taken over the ranks that have the same slices. That is done in the same pass, after the
// mean of the others over the replicas, with buckets and collectives of its own.
//
// [Note: join] Replicas may run out of data at different times. In a join one that has left the loop meets the others
// on, with no gradients of its own but what it has left over, until all have left.
namespace lamina::data_parallel {

struct ReducerOptions {
  int passes_per_reduction = 1;  // see [Note: backward pass]
  std::int64_t bucket_bytes = 25 << 20;
  bool broadcast_buffers = true;  // those of the first replica that trains, after each reduction
  bool overlap = true;            // see [Note: overlap]; else sharded gradients, too, travel at the end of a pass
  Gradients gradients = Gradients::kCopied;
  std::optional<at::ScalarType> travels = {};  // in which gradients do, but where a hook sees to that; none: their own
};

// The gradients and buffers of one replica's part of a model, and those of the same part on the other replicas. A face
// makes one with the model, has it run steps and backwards, and tells it of others. One thread at a time makes
// collective calls; what is said of backwards may come from any.
class Reducer {
 public:
  using Tensors = GroupReduction::Tensors;
  using Replicas = GroupReduction::Group;
  // Parts of the model and of the job that it works with.
  struct Parts {
    Tensors parameters,  // of this rank's part, as they are now,
        buffers;         // in one order on all replicas
    Replicas group;
    // See [Note: two reductions]; none where `group` averages all gradients.
    std::optional<GroupReduction::Over> scaled = {};
    // Gradients come in one order on all replicas, as where the model has one partition: see [Note: overlap].
    bool in_one_order = false;
  };

  Reducer(ReducerOptions options, messaging::Mailbox& mailbox, std::vector<base::Rank> replicas,
          base::Patience patience, std::shared_ptr<value::Failures> failures, Parts parts);
  ~Reducer();

  // From now on `hook` makes of a bucket's gradients what they become. Throws base::UsageError the second time.
  void set_hook(Reduce hook);
  bool hooked() const { return hook_ != nullptr; }

  // Before the first pass: has the gradients of other parameters reduced by these.
  void set_sharded(std::shared_ptr<ShardedGradients> sharded) { sharded_ = std::move(sharded); }

  // Runs a step of the model by `run`, and ends the pass if it is one: collective over the replicas. `training`: the
  // mode of the model. Throws what `run` throws, and what a replica has failed with.
  using RunStep = std::function<pipeline::StepResult(pipeline::StepSpec spec)>;
  pipeline::StepResult run_step(pipeline::StepSpec spec, bool training, const RunStep& run);

  // Before the first pass: what this replica is about to be trained on, so that replicas with the same are told of it.
  void see_batch(std::span<const at::Tensor> batch);
  void share_batches() { batch_ = Passes::kSharedBatch; }  // they have the same on purpose
  bool looks_at_batches() const { return passes_.number() == 0 && batch_ != Passes::kSharedBatch; }

  // The model is called outside of steps. Returns the call's number, for await_backward(); 0 for one without gradients.
  std::int64_t note_call(bool training);
  // Runs a backward of the model's own.
  void run_backward(const std::function<void()>& run);
  // From now on, until the next time, gradients that come to these parameters, as they are now, are noticed, and the
  // end of the backward that they come in. See [Note: watched gradients].
  void watch(std::span<const at::Tensor> parameters);
  // Holds none of the parameters until the next watch(): all replicas do so between passes.
  void let_go();
  // A backward has reached the output of this call of the model: its end is noticed.
  void await_backward(std::int64_t call);
  // No backward can follow that call.
  void forget_call(std::int64_t call);

  // Around backwards that are held back; a call of the model between them is, wherever its backward runs.
  void hold_back() { ++held_back_; }
  void release() { --held_back_; }

  // Before somebody looks at gradients, or changes them: what waits for a later pass is averaged now, collective over
  // the replicas, all of whom have as much. Throws what a replica has failed with, and base::UsageError in a backward
  // or a step whose gradients are still to be averaged.
  void complete(const char* what);
  // Does so before an update, of which the next pass tells the other replicas.
  void before_update();

  // The parts of that. A backward has reached a parameter or the model's output, or has accumulated a gradient. True
  // where its end is to call end_backward().
  bool note_backward();
  bool note_gradient(const at::Tensor& parameter);

  // The end of a backward outside of steps: collective over the replicas. Throws what a replica has failed with.
  void end_backward();

  // Around a loop that joins: see [Note: join]. `by_everyone`: sums are divided by the number of all replicas, not of
  // those that train. `throws`: the first replica that leaves is an error of all. The end is collective.
  void begin_join(bool by_everyone, bool throws);
  bool joining() const { return joining_; }
  // There are gradients that the next reduction is to have: passes since the last one.
  bool accumulates() const { return since_ != 0 || keeps_; }
  void fail_join(const std::exception_ptr& error);
  void end_join();

  // A collective was left that may never end: a group cannot be closed then.
  bool stuck() const { return stuck_; }
  // The end of the job: lets go of the group apart, whoever keeps this. Nothing is reduced any more.
  void close();

 private:
  void require_unsharded(const char* what) const;
  void require_one_group(const char* what) const;
  void begin_step(bool training);
  void finish_pass();
  bool is_held_back() const { return heard_ ? !free_ : held_back_ > 0; }
  void forget_backward();
  base::UsageError too_early(const char* what) const;
  pipeline::Copies tell_samples(std::int64_t own);
  Passes::Met meet(Passes::Comes comes);
  void reduce_nth(const std::vector<int>& present, bool now);
  void reduce(const std::vector<int>& present);
  std::vector<NamedTensor> parameters() const;
  std::vector<NamedTensor> unsharded(std::vector<NamedTensor> parameters) const;
  // Makes the reductions do something, in their order.
  template <class Act>
  void each_reduction(const Act& act) {
    act(over_replicas_);
    if (scaled_) act(*scaled_);
  }
  bool may_be_left() const { return over_replicas_.may_be_left() && (!scaled_ || scaled_->may_be_left()); }
  void begin_pass();  // the next one
  void fail_pass(const std::exception_ptr& error);
  void leave_pass(const std::exception_ptr& error);  // that has failed on a replica
  void shadow(const Passes::Met& met);               // a pass of others
  void take_over(int root);                          // all that it has
  void together(const std::function<void()>& compute);
  std::int64_t count_call(bool training);
  std::int64_t calls_left_out();
  void fail_unseen_backward();  // the one before this, if it did not end

  void call_at_end_of_backward();

  const ReducerOptions options_;
  const Parts parts_;
  const std::vector<int> everyone_;
  Passes passes_;
  GroupReduction over_replicas_;
  std::optional<GroupReduction> scaled_;
  std::int64_t batch_ = Passes::kUnknownBatch;  // seen before the first pass
  bool joining_ = false;
  Reduce hook_;
  std::shared_ptr<ShardedGradients> sharded_;  // where there are any
  std::vector<at::Tensor> late_;               // sharded parameters with gradients that wait for the end of a pass
  std::unique_ptr<model::GradientWatch> watch_;
  const std::shared_ptr<Reducer*> alive_;     // this, which may be gone when a backward ends
  bool by_everyone_ = true, throws_ = false;  // of a join
  std::vector<int> present_;                  // those that trained in the latest pass that any trained in
  int since_ = 0;                             // passes since the last reduction
  bool pending_ = false;                      // there may be gradients that it did not have
  bool keeps_ = false;                        // some of a backward that was held back
  std::atomic<int> held_back_ = 0;
  bool stuck_ = false;
  bool trains_ = false;  // the step was entered with gradients
  bool told_ = true;     // the replicas know of each other's samples in this step, or each counts alone
  std::atomic<bool> in_step_ = false;
  std::atomic<bool> passed_ = false;    // there was a backward in this step, or gradients came in this backward
  std::atomic<bool> awaiting_ = false;  // the end of this backward will call end_backward()
  std::atomic<bool> met_ = false;       // the replicas have met in this backward
  // Calls that this backward has reached: there are some, and one of them was not held back.
  std::atomic<bool> heard_ = false, free_ = false;
  std::int64_t step_call_ = 0;
  std::mutex calls_mutex_;
  std::int64_t calls_ = 0;
  std::set<std::int64_t> left_out_;  // calls since the last pass that no backward has reached
};

}  // namespace lamina::data_parallel
