// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>

#include "lamina/base/wait.h"
#include "lamina/runtime/ambient.h"
#include "lamina/runtime/worker_pool.h"
#include "lamina/transport/message.h"

namespace lamina::runtime {

// [Note: step identity] Every rank of a pipeline enters the same steps. The leading rank announces each as it enters
// it, and waits for nobody; a rank that follows does nothing in a step whose announcement is not there or names another
// function than the one it has entered. Then it refuses the step, and says so to the leading rank, whose step that
// ends. Where the leading rank had no need of it and has left the step, its next one ends with that error.

// The step in progress on this rank: which one it is, the threads that work on it, and how it ended. The first error
// ends it; later ones are its consequences and are dropped.
class StepState {
 public:
  // `on_error` is called once per failed step, from the failing thread: it wakes whoever waits elsewhere.
  StepState(WorkerPool& pool, std::function<void()> on_error, base::Rank rank = {})
      : pool_(pool), on_error_(std::move(on_error)), rank_(rank) {}

  // Opens the next step in the calling thread, whose ambient state its threads get; `prepare` runs before any of them.
  // Unless this rank leads, nothing runs before the step is announced. After fail_for_good() the step has failed before
  // it begins. Throws base::UsageError inside a step.
  base::Step begin(const std::function<void(base::Step)>& prepare, const base::Call& entered = {}, bool leads = true);
  // Ends it; nothing runs in it any more.
  void end();
  bool is_open();
  base::Step latest();                // the one that is open, or was the last; -1 before the first
  std::optional<base::Step> begun();  // the one that is open and was announced
  base::Call entered();               // what begin() was told last

  // On a rank that follows: what the leading rank has entered as `step`.
  void receive_begin(base::Step step, base::Rank leader, const base::Call& announced);
  // On the leading rank: another one has refused `step`, as the text says.
  void refuse(base::Step step, const std::string& why);
  // Why this rank refuses the step that is open; "" when it does not.
  std::string refusal();

  // The ranks were found to wait for each other ([Note: mutual waits]). retract(): the step that is open, which nobody
  // has announced, was none: its number is the next one's. skip(): this rank does not come to `step` any more.
  void retract();
  bool retracted();
  void skip(base::Step step);

  // Runs `work` on a thread of the step; what it throws ends the step.
  void run(std::function<void()> work);

  // The same for the work that `ready` returns, which another rank has set off in `step` or, as soon as this rank
  // enters it, a later one; `ready` is called in the order of these calls, under this state's lock. Work of steps that
  // have ended or failed is dropped.
  using Ready = std::function<std::function<void()>()>;
  void run(base::Step step, Ready ready);

  // The end that the leading rank announced, or an error that another rank ended the step with.
  void receive_end(transport::Message&& end);

  void fail(base::Step step, std::exception_ptr error);
  void fail_for_good(std::exception_ptr error);  // this step and every later one
  void lose(const base::Loss& loss);             // of a rank of the pipeline: for good

  std::exception_ptr error();
  bool failed_for_good();

  // Waits, in the thread that entered the step, until `done()`, an error, or the end that another rank announced, which
  // is returned. The patience counts from the last thing that happened on this rank; `leader` is to announce the end.
  std::optional<transport::Message> wait_end(const base::Patience& patience, base::Rank leader,
                                             const std::function<bool()>& done);
  // Waits until no thread works on the step.
  void wait_idle(const base::Patience& patience);

 private:
  // How the step ends is known: what its threads still meet, and ranks that leave, change nothing any more.
  bool settled() const;
  bool has_end() const;  // the open step; that of one which was retracted is the next one's
  void compare();        // what was announced with what was entered, under the lock
  void start_early(std::unique_lock<std::mutex>& lock);
  void fail_thread(base::Step step, std::exception_ptr error);
  void fail_locked(std::exception_ptr error, std::unique_lock<std::mutex>& lock);
  enum class Awaited : bool { kNo, kYes };                         // by wait_end()
  void start_thread(std::function<void()> work, Awaited awaited);  // under the lock

  WorkerPool& pool_;
  const std::function<void()> on_error_;
  const base::Rank rank_;
  std::mutex mutex_;
  std::condition_variable changed_;  // what wait_end() waits for
  std::condition_variable idle_;     // no thread works on the step
  base::Step current_{-1};
  bool open_ = false;
  int threads_ = 0;
  base::Deadline::Clock::time_point last_event_;  // a thread began or ended its work
  std::shared_ptr<const Ambient> ambient_;
  base::Call entered_;
  bool begun_ = false;  // announced, by this rank or to it
  bool retracted_ = false;
  std::string refusal_;
  std::exception_ptr error_;
  bool done_ = false;  // wait_end() has returned without an error
  std::exception_ptr for_good_;
  std::exception_ptr late_;  // of an earlier step, for the next one
  struct Announced {
    base::Rank leader;
    base::Call call;
  };
  std::map<base::Step, Announced> begins_;
  std::map<base::Step, transport::Message> ends_;
  std::map<base::Step, std::deque<Ready>> early_;
};

}  // namespace lamina::runtime
