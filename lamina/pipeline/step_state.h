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
#include "lamina/pipeline/ambient.h"
#include "lamina/pipeline/worker_pool.h"
#include "lamina/transport/message.h"

namespace lamina::pipeline {

// The step in progress on this rank: which one it is, the threads that work on it, and how it ended. The first error
// ends it; later ones are its consequences and are dropped.
class StepState {
 public:
  // `on_error` is called once per failed step, from the failing thread: it wakes whoever waits elsewhere.
  StepState(WorkerPool& pool, std::function<void()> on_error) : pool_(pool), on_error_(std::move(on_error)) {}

  // Opens the next step in the calling thread, whose ambient state its threads get; `prepare` runs before any of them.
  // After fail_for_good() the step has failed before it begins. Throws base::UsageError inside a step.
  base::Step begin(const std::function<void(base::Step)>& prepare);
  // Ends it; nothing runs in it any more.
  void end();
  bool is_open();
  base::Step latest();  // the one that is open, or was the last; -1 before the first

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
  void fail_for_good(std::exception_ptr error);        // this step and every later one
  void lose(base::Rank rank, const std::string& why);  // a rank of the pipeline is gone: for good

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
  void fail_thread(base::Step step, std::exception_ptr error);
  void fail_locked(std::exception_ptr error, std::unique_lock<std::mutex>& lock);
  enum class Awaited : bool { kNo, kYes };                         // by wait_end()
  void start_thread(std::function<void()> work, Awaited awaited);  // under the lock

  WorkerPool& pool_;
  const std::function<void()> on_error_;
  std::mutex mutex_;
  std::condition_variable changed_;  // what wait_end() waits for
  std::condition_variable idle_;     // no thread works on the step
  base::Step current_{-1};
  bool open_ = false;
  int threads_ = 0;
  base::Deadline::Clock::time_point last_event_;  // a thread began or ended its work
  std::shared_ptr<const Ambient> ambient_;
  std::exception_ptr error_;
  bool done_ = false;  // wait_end() has returned without an error
  std::exception_ptr for_good_;
  std::map<base::Step, transport::Message> ends_;
  std::map<base::Step, std::deque<Ready>> early_;
};

}  // namespace lamina::pipeline
