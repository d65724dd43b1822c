// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <condition_variable>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>

#include "lamina/base/wait.h"
#include "lamina/observe/recorder.h"
#include "lamina/runtime/compute_slot.h"
#include "lamina/runtime/ordered_gradients.h"
#include "lamina/runtime/parameter_flags.h"
#include "lamina/runtime/running_statistics.h"
#include "lamina/runtime/thread_state.h"
#include "lamina/runtime/worker_pool.h"

namespace lamina::runtime {

// One step on this rank: the threads that work on it, the compute slot that passes between them, what moves with the
// slot, and how it failed. Made when the rank enters the step; gone with the last thread that works on it. The first
// error ends it; later ones are its consequences and are dropped.
class StepContext : public std::enable_shared_from_this<StepContext> {
 public:
  struct Options {
    base::Step number{0};
    int microbatches = 0;
    schedule::TeamTurns turns;
    base::Clock::duration timeout = std::chrono::seconds(1800);  // see ComputeSlot
    std::shared_ptr<const ThreadState> thread_state;             // its threads get it; may be nullptr
    std::shared_ptr<const ParameterFlags::Watched> watched;      // nullptr: no flags are
    observe::Recorder* recorder = nullptr;
  };

  StepContext(WorkerPool& pool, Options options);
  virtual ~StepContext() = default;
  StepContext(const StepContext&) = delete;

  base::Step number() const { return number_; }
  ComputeSlot& slot() { return slot_; }

  // State that moves with the slot, to the microbatch that computes; nothing where none is to.
  std::optional<OrderedGradients> gradients;
  std::optional<ParameterFlags> flags;
  RunningStatistics statistics;
  // Notes who had the slot, and when; nullptr for nobody.
  observe::Recorder* recorder() const { return recorder_ != nullptr && recorder_->on() ? recorder_ : nullptr; }

  // Runs `work` on a thread of the step; what it throws ends the step. wait() and wait_end() look again when it is
  // over.
  void run(std::function<void()> work);
  // Runs what another rank has set off: dropped when the step has failed, and where there is no thread to have,
  // that is the step's error.
  void serve(std::function<void()> work);

  // Ends the step with `error`, unless it has one; wakes whoever waits in it.
  void fail(std::exception_ptr error);
  // Fails it unless its end is known already: what its threads meet then, and ranks that leave, changes nothing.
  void fail_unless_settled(std::exception_ptr error);
  std::exception_ptr error() const;
  // From whoever hears how it ends.
  void settle();
  bool settled() const;

  // Waits, in the thread that entered it, until `done()`, an error, or settle(), which rank `leader` is to bring about.
  // The patience counts from the last thing that happened in this step. wait_end() settles it, unless it has failed.
  void wait_end(const base::Patience& patience, base::Rank leader, const std::function<bool()>& done);
  void wait(const base::Patience& patience, base::Rank leader, const std::function<bool()>& done);
  void wake();  // it looks again
  // Waits until no thread works on it.
  void wait_idle(const base::Patience& patience);
  // The step is over, says the thread that entered it: what may hold objects of a face goes here, not in the thread
  // that is the last to leave.
  virtual void close();

 protected:
  // Wakes whoever waits in the step, from any thread; what waits from then on does not.
  virtual void cancel() { slot_.cancel(); }

 private:
  void fail_thread(std::exception_ptr error);
  void fail_locked(std::exception_ptr error, std::unique_lock<std::mutex>& lock);
  void wait_locked(const base::Patience& patience, base::Rank leader, const std::function<bool()>& done,
                   std::unique_lock<std::mutex>& lock);
  enum class Awaited : bool { kNo, kYes };                         // by the thread that entered the step
  void start_thread(std::function<void()> work, Awaited awaited);  // under the lock

  const base::Step number_;
  WorkerPool& pool_;
  ComputeSlot slot_;
  observe::Recorder* const recorder_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;  // what wait() and wait_end() wait for
  std::condition_variable idle_;     // no thread works on it
  std::shared_ptr<const ThreadState> thread_state_;
  int threads_ = 0;
  base::Clock::time_point last_event_;  // a thread began or ended its work
  bool settled_ = false;
  std::exception_ptr error_;
};

}  // namespace lamina::runtime
