// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "lamina/environment/progress.h"
#include "lamina/messaging/handlers.h"
#include "lamina/messaging/mailbox.h"
#include "lamina/messaging/presence.h"
#include "lamina/model/call_hooks.h"
#include "lamina/observe/recorder.h"
#include "lamina/remote/execution_server.h"
#include "lamina/remote/remote_calls.h"
#include "lamina/runtime/ordered_gradients.h"
#include "lamina/runtime/parameter_flags.h"
#include "lamina/runtime/running_statistics.h"
#include "lamina/runtime/step_state.h"
#include "lamina/runtime/rng_streams.h"
#include "lamina/value/failure.h"

namespace lamina::pipeline {

struct JobOptions {
  std::string schedule = "interleaved";
  int active_microbatches = 3;
  bool deterministic = false;                                          // see set_order()
  std::chrono::duration<double> timeout = std::chrono::seconds(1800);  // how long a live rank may take to answer
  std::optional<std::uint64_t> seed;                                   // see RootSeeds
  std::int64_t microbatches_before = 0;                                // those of earlier replicas
  std::vector<base::Rank> pipeline;  // the ranks of this rank's pipeline, by partition
  runtime::WorkerPool::Hooks thread_hooks;
  std::shared_ptr<value::Failures> failures;  // nullptr: those of C++
  std::string timeline_part;                  // a file for what this rank does, see observe::Recorder; "": none
};

// The engine of one rank: everything between a step function and the messages. Several may live in one process.
//
// Every rank of a pipeline calls the same steps in the same order. The rank of partition 0 leads them: it runs the step
// body once per microbatch. The others follow: they serve calls of their modules, and get the leader's outputs.
class Job {
 public:
  using Body = std::function<value::Value(base::Microbatch)>;

  // Takes over the transport and starts it. Throws base::ConfigError for wrong options.
  Job(JobOptions options, std::unique_ptr<transport::Transport> transport);
  // Leaves as close(false) does.
  ~Job();

  base::Rank rank() const { return transport_->rank(); }
  bool leads() const { return rank() == options_.pipeline.front(); }
  messaging::Mailbox& mailbox() { return mailbox_; }
  messaging::Presence& presence() { return presence_; }
  // Tells the other ranks how this one comes to leave, before it does.
  void tell_leaving(const std::string& how);

  // The model: its modules, and the rank that owns each.
  void set_model(std::shared_ptr<model::Modules> modules, std::vector<base::Rank> owners);

  // What is done around calls of its modules; see [Note: call hooks].
  model::CallHooks& call_hooks() { return call_hooks_; }

  // In a deterministic job, before a step, on every rank: the parameters whose gradients this rank accumulates, and
  // whether forwards change the model (its buffers, but those given to set_statistics()), on whichever rank. Two runs
  // of the same steps then give the same bits: see [Note: ordered gradients]. Where forwards change the model
  // microbatches run one after the other, as in the plain loop. In the step in which the model is cut, once more when
  // that is known, in the thread that entered it.
  void set_order(remote::Tensors parameters, bool forwards_change_the_model);

  // Before a step, alike on every rank of the pipeline: the model's parameters and buffers, whose requires_grad a body
  // may set; see [Note: flags of parameters].
  void watch_flags(std::vector<std::string> names, remote::Tensors tensors) {
    flags_.watch(std::move(names), std::move(tensors));
  }

  // At the same times, after it: the BatchNorms of this rank that keep running statistics. Those are then the plain
  // loop's after each step: see [Note: running statistics].
  void set_statistics(std::vector<runtime::BatchNorm> modules);

  // Runs one step of `microbatches` microbatches and returns the body's outputs, one per microbatch, on every rank. The
  // leading rank's number counts, and `body` is used there only. `call`: of a step function, by its name; all ranks
  // give the same one, see [Note: step identity]. Throws the first error that any rank met, on the other ranks as
  // value::RemoteFailure. The job is usable afterwards, unless a rank was lost.
  std::vector<value::Value> run_step(int microbatches, const Body& body, const std::function<void()>& check_interrupt,
                                     const base::Call& call = {});

  // A step whose bodies run one after the other in the calling thread: enough where the pipeline is this rank alone.
  // What a body throws ends it.
  void run_step_here(int microbatches, const std::function<void(base::Microbatch)>& body);

  // In a step body or a module that is served: a call of module `id`, here or on its owner. Throws base::UsageError
  // outside a step.
  value::Value call(base::ModuleId id, value::Value arguments);

  // Where the random numbers of a job with a seed are: see RootSeeds. Not inside a step.
  runtime::RootSeeds& seeds() { return seeds_; }

  // How many backwards of other ranks' modules this one has asked for.
  std::int64_t backwards() const { return calls_.backwards(); }

  // See RemoteCalls::take_notes.
  std::vector<std::string> take_notes() { return calls_.take_notes(); }

  // In a step body: the backward of `tensors` over all ranks; see run_backward for the arguments.
  void backward(const remote::Tensors& tensors, const remote::Tensors& gradients, double scale);

  // What this rank does in steps, from start_timeline() to stop_timeline(). Throws base::UsageError where events are
  // kept already.
  void start_timeline();
  observe::Timeline stop_timeline() { return recorder_.stop(); }
  bool records_events() const { return recorder_.keeps_events(); }
  // The same in numbers, since the last call; the first one begins to count.
  observe::Totals take_totals();

  // Ends the job; see Transport::close. Not inside a step. Idempotent. False when a thread is still in the user's code
  // of a step that failed: then the job must never be destroyed.
  bool close(bool orderly);
  // The same, but the connections stay until the process ends, so that the peers learn of its end and of nothing before
  // it but, where it was `interrupted` (Ctrl-C), that. Afterwards the job must never be destroyed.
  bool leave(bool interrupted = false);

 private:
  void lose(base::Rank rank, const std::string& why);
  std::vector<value::Value> lead(base::Step step, int microbatches, const Body& body, const base::Patience& patience);
  std::vector<value::Value> follow(base::Step step, const base::Patience& patience);
  // To the ranks that wait for it, of this pipeline; those that are lost are left out.
  void announce(const transport::Message& message);
  // How the wait of the thread that has entered a step can end before its time: see [Note: mutual waits].
  messaging::MutualWaits::Operation operation(base::Step step) const;
  void keep_steps();
  messaging::MutualWaits::Wait wait_for_end(base::Step step);
  bool end(std::chrono::seconds patience);  // false: a thread did not end
  // Waits for the step's threads; returns its error, an interrupt meanwhile included.
  std::exception_ptr leave_step(base::Step step, const std::function<void()>& check_interrupt);

  observe::Timeline empty_timeline() const;

  const JobOptions options_;
  const environment::ProgressReporter progress_;
  observe::Recorder recorder_;
  std::atomic<std::int64_t> steps_here_ = 0;
  const std::unique_ptr<transport::Transport> transport_;
  model::CallHooks call_hooks_;
  std::shared_ptr<model::Modules> modules_;
  std::vector<base::Rank> owners_;
  runtime::RootSeeds seeds_;
  runtime::OrderedGradients gradients_;
  runtime::ParameterFlags flags_;
  runtime::ParameterFlags::Flags flags_left_;  // by the last microbatch of this step
  remote::Tensors parameters_;
  runtime::RunningStatistics statistics_;
  std::vector<runtime::BatchNorm> batch_norms_;
  bool overlaps_;                         // microbatches, in time
  std::optional<base::Rank> first_lost_;  // touched by the transport's thread alone
  runtime::ComputeSlot slot_;
  messaging::Handlers handlers_;
  remote::Inbox inbox_{handlers_};
  remote::RemoteCalls calls_;
  remote::ExecutionServer server_;
  messaging::Mailbox mailbox_;
  messaging::Presence presence_{mailbox_};
  std::unique_ptr<runtime::WorkerPool> pool_;
  runtime::StepState state_;
};

}  // namespace lamina::pipeline
