// SPDX-License-Identifier: Apache-2.0
// States of the slot, under mutex_: free, or held by one waiter that was granted it. States of a waiter:
//
//   waits --the schedule picks it--> granted --release(), queue_again()--> gone
//     `--cancel(), its deadline, the end of a Place that nobody came for--> gone
//
// Threads: contexts wait, each on a condition of its own, so that the one that is picked wakes alone. The
// transport's thread takes places for them and never waits. cancel() runs in the one that ends the step.
//
// Locks: mutex_, under which nothing else is taken; it is the last one of the order, and nobody waits here holding any
// other, or the GIL. See docs/thread-model.md.
#include "lamina/runtime/compute_slot.h"

#include <algorithm>
#include <cassert>

namespace lamina::runtime {

ComputeSlot::ComputeSlot(std::unique_ptr<schedule::Schedule> schedule, base::Deadline::Clock::duration timeout,
                         std::function<bool()> holds_interpreter_lock)
    : schedule_(std::move(schedule)),
      patience_{timeout, nullptr, /*tell=*/nullptr},
      holds_interpreter_lock_(std::move(holds_interpreter_lock)) {}

void ComputeSlot::check_lock_order() const {
  assert((!holds_interpreter_lock_ || !holds_interpreter_lock_()) && "a thread waits for its turn holding the GIL");
}

void ComputeSlot::follow(std::unique_ptr<schedule::Schedule> schedule) {
  std::lock_guard guard(mutex_);
  schedule_ = std::move(schedule);
}

void ComputeSlot::expect(int microbatches) {
  std::lock_guard guard(mutex_);
  progress_.microbatches = microbatches;
}

void ComputeSlot::cancel() {
  std::lock_guard guard(mutex_);
  cancelled_ = true;
  for (Waiter* waiter : waiters_) waiter->wake.notify_one();
}

bool ComputeSlot::cancelled() {
  std::lock_guard guard(mutex_);
  return cancelled_;
}

void ComputeSlot::acquire(schedule::Phase phase, base::Microbatch microbatch) {
  std::unique_lock lock(mutex_);
  Waiter self;
  enqueue(self, phase, microbatch);
  wait_for_turn(self, lock);
}

void ComputeSlot::queue_again(schedule::Phase phase, base::Microbatch microbatch) {
  std::unique_lock lock(mutex_);
  Waiter self;
  enqueue(self, phase, microbatch);
  hand_over();
  wait_for_turn(self, lock);
}

std::shared_ptr<ComputeSlot::Place> ComputeSlot::reserve(schedule::Phase phase, base::Microbatch microbatch) {
  auto place = std::make_shared<Place>(*this);
  std::lock_guard guard(mutex_);
  enqueue(place->waiter_, phase, microbatch);
  return place;
}

void ComputeSlot::acquire(Place& place) {
  std::unique_lock lock(mutex_);
  place.taken_ = true;
  wait_for_turn(place.waiter_, lock);
}

void ComputeSlot::abandon(Waiter& waiter) {
  std::lock_guard guard(mutex_);
  std::erase(waiters_, &waiter);
  if (!waiter.granted) return;
  held_ = false;
  pass_on();
}

void ComputeSlot::enqueue(Waiter& waiter, schedule::Phase phase, base::Microbatch microbatch) {
  waiter.ticket = {phase, microbatch, arrivals_++};
  waiters_.push_back(&waiter);
  pass_on();
}

void ComputeSlot::wait_for_turn(Waiter& self, std::unique_lock<std::mutex>& lock) {
  check_lock_order();
  const auto ready = [&] { return self.granted || cancelled_; };
  const auto what = [&] {
    return base::str("turn of microbatch ", self.ticket.microbatch, " to compute on this rank");
  };
  try {
    base::wait_until(lock, self.wake, patience_, ready, what);
  } catch (const base::TimeoutError&) {
    std::erase(waiters_, &self);
    throw;
  }
  if (!self.granted) {
    std::erase(waiters_, &self);
    throw base::CancelledError("the step was ended by an error elsewhere");
  }
  lock.unlock();
  if (processor_) processor_->return_to_it();
}

void ComputeSlot::release() {
  std::unique_lock lock(mutex_);
  const bool taken = hand_over();
  lock.unlock();
  if (!taken) idle_();
}

void ComputeSlot::forward_done() {
  std::lock_guard guard(mutex_);
  ++progress_.forward_done;
  pass_on();
}

void ComputeSlot::finished() {
  std::lock_guard guard(mutex_);
  ++progress_.finished;
  pass_on();
}

void ComputeSlot::hold_starts(bool hold) {
  std::lock_guard guard(mutex_);
  holds_starts_ = hold;
  pass_on();
}

bool ComputeSlot::hand_over() {
  if (processor_) processor_->leave();
  held_ = false;
  pass_on();
  return held_;
}

void ComputeSlot::pass_on() {
  if (held_ || cancelled_ || waiters_.empty()) return;
  std::vector<Waiter*> ready;
  std::ranges::copy_if(waiters_, std::back_inserter(ready), [&](const Waiter* waiter) {
    return !holds_starts_ || waiter->ticket.phase != schedule::Phase::kStart;
  });
  std::vector<schedule::Ticket> tickets(ready.size());
  std::ranges::transform(ready, tickets.begin(), [](const Waiter* waiter) { return waiter->ticket; });
  auto progress = progress_;
  if (holds_starts_) progress.microbatches = progress.started;  // nobody is to wait for those
  const auto next = schedule_->pick(tickets, progress);
  if (!next) return;
  Waiter* waiter = ready[*next];
  std::erase(waiters_, waiter);
  progress_.go_on(waiter->ticket);
  held_ = true;
  waiter->granted = true;
  waiter->wake.notify_one();
}

}  // namespace lamina::runtime
