// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "lamina/environment/progress.h"
#include "lamina/messaging/messenger.h"
#include "lamina/model/call_hooks.h"
#include "lamina/observe/recorder.h"
#include "lamina/pipeline/first_call.h"
#include "lamina/pipeline/pieces.h"
#include "lamina/remote/execution_server.h"
#include "lamina/remote/remote_calls.h"
#include "lamina/remote/steps.h"
#include "lamina/runtime/rng_streams.h"
#include "lamina/value/failure.h"

namespace lamina::verification {
class RunRecorder;
}

namespace lamina::pipeline {

struct JobOptions {
  std::string schedule = "interleaved";
  int active_microbatches = 3;
  bool deterministic = false;                                          // see set_order()
  std::chrono::duration<double> timeout = std::chrono::seconds(1800);  // how long a live rank may take to answer
  std::optional<std::uint64_t> seed;                                   // see RootSeeds
  int microbatches = 1;                                                // see set_microbatches()
  int replica = 0, replicas = 1;
  std::shared_ptr<verification::RunRecorder> run_recorder;  // nullptr: the run is not recorded
  std::vector<base::Rank> pipeline;                         // the ranks of this rank's pipeline, by partition
  bool few_processors = true;                               // this machine has less than two for each of its ranks
  runtime::WorkerPool::Hooks thread_hooks;
  std::shared_ptr<value::Failures> failures;  // nullptr: those of C++
};

// One step, as a rank enters it. The leading rank's counts, but for the call and what interrupts.
struct StepSpec {
  using Body = std::function<value::Value(base::Microbatch)>;
  int microbatches = 1;
  Body body;                              // used on the leading rank
  std::function<void()> check_interrupt;  // run by the thread that waits, at least every 50 ms; may throw
  // A step function, by its name; all ranks give the same one, see [Note: step identity].
  base::Call call = {};
  // In the step in which the model is cut, see [Note: first call]: cuts it where no body has called it. Empty in any
  // other.
  std::function<void()> cut = {};
  // Asked at the end: whether there was a backward that the engine has not run. May be empty.
  std::function<bool()> saw_backward = {};
  // Run as check_interrupt is, while the step goes on: throws where ranks of other pipelines have failed that it needs.
  // May be empty.
  std::function<void()> check_others = {};
  // The samples of each microbatch; empty where they are not known. See [Note: uneven batches].
  std::vector<std::int64_t> samples = {};
  // Collective over the copies of the model, in the first backward of a step: tells them of this one's samples, -1
  // where they are not known, and gives those of all. Empty where there is one copy, or each counts alone.
  std::function<Copies(std::int64_t samples)> tell_samples = {};
};

// Facts of a step after its end, on every rank.
struct StepResult {
  std::vector<value::Value> outputs;  // of the body, one per microbatch
  bool backward = false;              // there was one
  std::vector<std::int64_t> samples = {};
};

// The steps of one rank: everything between a step function and the messages. Several may live in one process.
//
// Every rank of a pipeline calls the same steps in the same order. The rank of partition 0 leads them: it runs the step
// body once per microbatch. The others follow: they serve calls of their modules, and get the leader's outputs.
class Job {
 public:
  using Body = StepSpec::Body;

  // Before the messenger starts. Throws base::ConfigError for wrong options.
  Job(JobOptions options, messaging::Messenger& messenger, observe::Recorder& recorder);
  // Closes the messenger, whose messages come here.
  ~Job();

  base::Rank rank() const { return messenger_.rank(); }
  bool leads() const { return rank() == options_.pipeline.front(); }
  bool alone() const { return options_.pipeline.size() == 1; }

  // From the next step on its turns are those of this team, which this rank is in: see [Note: turns of a team].
  // Outside of steps, on all members. With `own_batches` no call is predicted: one of shapes that are known on one rank
  // may be new on another, and their turns would end elsewhere.
  void join_team(std::vector<base::Rank> team, bool own_batches);
  const std::vector<base::Rank>& team() const { return team_; }  // empty: it is in none

  // The model: its modules, and the rank that owns each.
  void set_model(std::shared_ptr<model::Modules> modules, std::vector<base::Rank> owners);

  // Hooks around calls of its modules; see [Note: call hooks].
  model::CallHooks& call_hooks() { return call_hooks_; }

  // Has two runs of the same steps give the same bits, in a deterministic job: see [Note: ordered gradients]. Called on
  // every rank before a step, and in the step that cuts the model once more after the cut, in the thread that entered
  // it. `parameters`: those whose gradients this rank accumulates. `forwards_change_the_model`: on some rank a forward
  // writes to a buffer that set_statistics() was not given. Then microbatches run one after the other, as in the plain
  // loop.
  void set_order(remote::Tensors parameters, bool forwards_change_the_model);

  // Takes the model's parameters and buffers, before a step, alike on every rank of the pipeline: a body may set their
  // requires_grad. See [Note: flags of parameters].
  void watch_flags(std::vector<std::string> names, remote::Tensors tensors);

  // Takes this rank's BatchNorms that keep running statistics, whenever set_order() is called, after it. After each
  // step their statistics are the plain loop's: see [Note: running statistics].
  void set_statistics(std::vector<runtime::BatchNorm> modules);

  // Runs one step. Throws the first error that any rank met, on the other ranks as value::RemoteFailure. The job is
  // usable afterwards, unless a rank was lost.
  StepResult run_step(const StepSpec& spec);

  // Runs a step whose bodies go one after the other in the calling thread: enough where the pipeline is this rank
  // alone. What a body throws ends it.
  StepResult run_step_here(const StepSpec& spec);

  // Says that a step of several threads is under way.
  bool in_step() { return steps_.open() != nullptr; }

  // In a body of the step in which the model is cut: has `cut` run by the thread that entered the step, unless it is
  // cut already, and waits for that; see [Note: first call].
  void cut_here(std::function<void()> cut);

  // In a step body or a module that is served: a call of module `id`, here or on its owner. Throws base::UsageError
  // outside a step.
  value::Value call(base::ModuleId id, value::Value arguments);

  // The position in the random numbers of a job with a seed: see RootSeeds. Not inside a step.
  runtime::RootSeeds& seeds() { return seeds_; }

  // How many microbatches a step of each replica has, at most: on every rank alike, not inside a step.
  void set_microbatches(int microbatches);
  // How many a step of all replicas together has: each gets its part, or one more, and one at least. `alike`: as many
  // as any other one gets.
  void share_out(std::int64_t all_microbatches, bool alike);
  int microbatches() const { return microbatches_; }  // of this replica
  std::int64_t all_microbatches() const { return all_microbatches_; }

  // How many backwards of other ranks' modules this one has asked for.
  std::int64_t backwards() const { return calls_.backwards(); }

  // See RemoteCalls::take_notes.
  std::vector<std::string> take_notes() { return calls_.take_notes(); }

  // In a step body: the backward of `tensors` over all ranks; see run_backward for the arguments.
  void backward(const remote::Tensors& tensors, const remote::Tensors& gradients, double scale);

  // Says to whoever watches this process that it goes on, between steps.
  void goes_on() const { progress_.end(steps_here_); }

  // How many steps have begun here.
  std::int64_t steps();

  // Ends the threads of steps; not inside a step. `orderly`: in no hurry. Idempotent. False when a thread is still in
  // the user's code of a step that failed: then the job must never be destroyed.
  bool end(bool orderly);

 private:
  // Words on a lost rank: what this one asked of it, and what that asked for.
  std::string known_of(base::Rank lost);
  void lose(const base::Loss& loss);
  std::shared_ptr<remote::StepScope> make_step(base::Step number, int microbatches,
                                               std::shared_ptr<const runtime::ThreadState> thread_state);
  // Each returns what its end says, of a step that has not failed.
  struct Ended {
    StepResult result;
    runtime::ParameterFlags::Flags flags;  // of parameters, as the step leaves them
  };
  Ended lead(remote::StepScope& step, const StepSpec& spec, const base::Patience& patience);
  Ended follow(remote::StepScope& step, const base::Patience& patience);
  // Starts the bodies; what it returns gets the outputs.
  struct Bodies;
  std::shared_ptr<Bodies> start_bodies(remote::StepScope& step, const StepSpec& spec);
  // Backwards of this rank's step bodies, and of other ranks' modules that it has asked for.
  std::int64_t all_backwards() const { return backwards_ + calls_.backwards(); }
  // Says that there was a backward in the step, so far.
  bool saw_backward(const StepSpec& spec, std::int64_t backwards_before) const;
  // To the ranks that wait for it, of this pipeline; those that are lost are left out.
  void announce(const transport::Message& message);
  // How the wait of the thread that has entered a step can end before its time: see [Note: mutual waits].
  messaging::WaitOperation operation(base::Step step) const;
  void keep_steps();
  // Its turns where this rank is one of a team; see [Note: turns of a team].
  schedule::TeamTurns make_turns() const;
  void tell_team(base::Step step, const schedule::Pick& word);
  void require_same_turns(remote::StepScope& step) const;
  // For the thread that has entered the step.
  base::Patience patience_in(remote::StepScope& step, const StepSpec& spec) const;
  messaging::MutualWaits::Wait wait_for_end(remote::StepScope& step);
  // To the other ranks: why this one refuses the step, and its error.
  void announce_failure(const remote::StepScope& step);
  // Waits for the step's threads; an interrupt meanwhile is its error.
  void drain(remote::StepScope& step, const std::function<void()>& check_interrupt);

  // Says that microbatches are under way at the same time.
  bool overlaps() const;
  std::unique_ptr<schedule::Schedule> schedule() const;

  const JobOptions options_;
  messaging::Messenger& messenger_;
  observe::Recorder& recorder_;
  std::vector<base::Rank> team_;
  const environment::ProgressReporter progress_;
  std::atomic<std::int64_t> steps_here_ = 0;
  model::CallHooks call_hooks_;
  std::shared_ptr<model::Modules> modules_;
  std::vector<base::Rank> owners_;
  int microbatches_;
  std::int64_t all_microbatches_;
  runtime::RootSeeds seeds_;
  std::shared_ptr<const runtime::ParameterFlags::Watched> watched_;
  remote::Tensors parameters_;  // whose gradients are ordered
  std::vector<runtime::BatchNorm> batch_norms_;
  bool forwards_change_the_model_ = false;
  std::atomic<std::shared_ptr<FirstCall>> first_call_;  // in the step in which the model is cut
  std::atomic<std::int64_t> backwards_ = 0;             // of step bodies, ever
  remote::Steps steps_;
  remote::RemoteCalls calls_;
  remote::ExecutionServer server_;
  std::unique_ptr<runtime::WorkerPool> pool_;
};

}  // namespace lamina::pipeline
