// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "lamina/base/wait.h"
#include "lamina/plan/schedule.h"

namespace lamina::pipeline {

// [Note: compute slot] Each microbatch, and each request that is served, has its own thread. One slot per rank passes
// between them, so exactly one computes at a time and its code reads top to bottom. A thread gives the slot up only
// while it waits for another rank; the schedule decides who gets it next. Lock order: the slot, then Python's GIL;
// nobody waits for the slot while holding the GIL.
class ComputeSlot {
 public:
  // `holds_interpreter_lock` says whether this thread has the GIL, where there is one.
  ComputeSlot(std::unique_ptr<plan::Schedule> schedule, base::Deadline::Clock::duration timeout,
              std::function<bool()> holds_interpreter_lock = nullptr);

  // Forgets the last step: no microbatch has started, nothing is cancelled. Nobody holds or awaits the slot.
  void begin_step(int microbatches);

  // From now on, and for those that wait now, acquire() throws base::CancelledError.
  void cancel();
  bool cancelled();

  // Waits until the schedule picks this thread. Throws base::CancelledError.
  void acquire(plan::Phase phase, base::Microbatch microbatch);
  void release();
  // Both in one: gives the slot up and waits for it among those that wait already.
  void queue_again(plan::Phase phase, base::Microbatch microbatch);

  // In debug builds ends the process of whoever is about to wait for the slot, or for another rank, with the GIL.
  void check_lock_order() const;

  // A microbatch has reached its first backward, or ended without one; its step body has ended.
  void forward_done();
  void finished();

 private:
  struct Waiter {
    plan::Ticket ticket;
    bool granted = false;
    std::condition_variable wake;
  };

  void wait_for_turn(plan::Phase phase, base::Microbatch microbatch, std::unique_lock<std::mutex>& lock);
  void pass_on();  // gives a free slot to the waiter that the schedule picks

  const std::unique_ptr<plan::Schedule> schedule_;
  const base::Patience patience_;
  const std::function<bool()> holds_interpreter_lock_;
  std::mutex mutex_;
  std::vector<Waiter*> waiters_;
  plan::Progress progress_;
  std::uint64_t arrivals_ = 0;
  bool held_ = false;
  bool cancelled_ = false;
};

}  // namespace lamina::pipeline
