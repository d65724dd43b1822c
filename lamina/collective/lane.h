// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

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

// One operation of a backend, as torch's work. It ends early, for all members, at its time-out, counted from when it
// begins to run, and when it is aborted.
class LaneWork : public c10d::Work {
 public:
  explicit LaneWork(LaneOperation operation);

  // Once, by one thread. `here`: it is the one that waits.
  void run(bool here);

  bool wait(std::chrono::milliseconds timeout) override;
  void queue_in(Lane& lane) { lane_ = &lane; }
  void abort() override { aborted_ = true; }
  std::vector<at::Tensor> result() override { return operation_.results; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

 private:
  LaneOperation operation_;
  std::atomic<bool> aborted_ = false;
  Lane* lane_ = nullptr;  // that will run it
  const c10::intrusive_ptr<c10::ivalue::Future> future_;
};
using LaneWorkPtr = c10::intrusive_ptr<LaneWork>;

// Runs operations one after the other, in a thread of its own, which the first that needs it starts. An operation that
// is started by what another's end calls runs there: nobody else would run it while that one waits for it.
class Lane {
 public:
  Lane() = default;
  ~Lane();  // aborts all
  Lane(const Lane&) = delete;

  // `here`: in the calling thread, where nothing is before it. Throws base::UsageError in a signal handler that has
  // interrupted an operation here: it would wait for itself.
  void run(const LaneWorkPtr& work, bool here);
  // In the lane's own thread: runs what waits, up to this work.
  void run_up_to(c10d::Work& work);
  // Ends what runs, and all that waits: each is begun and given up, so that the members stay in step.
  void abort();
  // Returns when nothing runs or waits; each operation has its time-out.
  void drain();

 private:
  void serve();
  void run_next(std::unique_lock<std::mutex>& lock);
  void run_up_to(c10d::Work& work, std::unique_lock<std::mutex>& lock);

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<LaneWorkPtr> waiting_;
  LaneWorkPtr running_;     // and what its end calls
  std::thread::id caller_;  // that runs it, where it is not the lane's own
  bool closing_ = false;
  std::thread thread_;
};

}  // namespace lamina::collective
