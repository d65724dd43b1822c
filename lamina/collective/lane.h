// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "lamina/base/deadline.h"
#include "lamina/base/fork_guard.h"
#include "lamina/shared_memory/exchange.h"

namespace lamina::collective {

// An operation over shared memory, as it is started.
struct LaneOperation {
  c10d::OpType type;
  const char* name;                 // as torch's profiler shows it; lives for ever
  std::vector<at::Tensor> results;  // of its future
  std::chrono::milliseconds timeout;
  bool synchronous;                       // whoever calls wait() has given it up when the wait is interrupted
  std::function<void()> check_interrupt;  // in the thread that waits; empty: nobody interrupts
  std::function<void(const shared_memory::Check& check)> run;
};

class Lane;

// One operation of a backend, as torch's work. It ends early, for all members, at its time-out and when it is aborted.
class LaneWork : public c10d::Work {
 public:
  using Time = base::Clock::time_point;
  explicit LaneWork(LaneOperation operation);

  // Once, by one thread. `here`: it is the one that waits. `moved`: when the lane was last seen to get on; the time-out
  // counts from there, or from when this work was queued. True unless it ended by its time-out.
  bool run(bool here, Time moved);

  // Throws base::UsageError in a child of fork(), where it never ends.
  bool wait(std::chrono::milliseconds timeout) override;
  void queue_in(Lane& lane);
  void abort() override { aborted_ = true; }
  const char* name() const { return operation_.name; }
  // Names the sender of a receipt from whoever sends.
  int sourceRank() const override { return source_; }
  void set_source(int member) { source_ = member; }
  std::vector<at::Tensor> result() override { return operation_.results; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

 private:
  LaneOperation operation_;
  std::atomic<bool> aborted_ = false;
  std::atomic<int> source_ = -1;
  Lane* lane_ = nullptr;  // that will run it
  Time queued_;
  const base::MadeHere process_;
  const c10::intrusive_ptr<c10::ivalue::Future> future_;
};
using LaneWorkPtr = c10::intrusive_ptr<LaneWork>;

// Runs operations one after the other, in a thread of its own, which the first that needs it starts. An operation that
// is started by what another's end calls runs there: nobody else would run it while that one waits for it. The thread
// keeps the lane, so that what an operation's end calls may close it, and let it go. In a child of fork() a lane does
// nothing, and its thread, which is not there, keeps it for ever: its mutex may be held.
class Lane : public std::enable_shared_from_this<Lane> {
 public:
  // `here`: in the calling thread, where nothing is before it. Throws base::UsageError in a signal handler that has
  // interrupted an operation here: it would wait for itself; in a child of fork(); and after close().
  void run(const LaneWorkPtr& work, bool here);
  // True in an operation, or what its end calls, in a lane's own thread.
  static bool runs_here();
  // Nothing runs or waits.
  bool idle();
  // In the lane's own thread: runs what waits, up to this work.
  void run_up_to(c10d::Work& work);
  // Ends what runs, and all that waits: each is begun and given up, so that the members stay in step.
  void abort();
  // Returns when nothing runs or waits but what calls this; each operation has its time-out. Throws what
  // `check_interrupt` does, where it is not empty.
  void drain(const std::function<void()>& check_interrupt = {});
  // Aborts all, and returns when it has ended; nothing runs here after that. To be called before the last reference to
  // it goes.
  void close();

 private:
  void abort_all();
  void serve();
  void run_next(std::unique_lock<std::mutex>& lock);
  void run_up_to(c10d::Work& work, std::unique_lock<std::mutex>& lock);

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<LaneWorkPtr> waiting_;
  LaneWorkPtr running_;     // and what its end calls
  std::thread::id caller_;  // that runs it, where it is not the lane's own
  LaneWork::Time moved_;    // when an operation last ended, but for those that ended by their time-outs
  bool closing_ = false;
  std::thread thread_;
  const base::MadeHere process_;
};

}  // namespace lamina::collective
