// SPDX-License-Identifier: Apache-2.0
#include "lamina/pipeline/compute_slot.h"

#include <algorithm>
#include <cassert>

namespace lamina::pipeline {

ComputeSlot::ComputeSlot(std::unique_ptr<plan::Schedule> schedule, base::Deadline::Clock::duration timeout,
                         std::function<bool()> holds_interpreter_lock)
    : schedule_(std::move(schedule)),
      patience_{timeout, nullptr, /*tell=*/nullptr},
      holds_interpreter_lock_(std::move(holds_interpreter_lock)) {}

void ComputeSlot::check_lock_order() const {
  assert((!holds_interpreter_lock_ || !holds_interpreter_lock_()) && "a thread waits for its turn holding the GIL");
}

void ComputeSlot::begin_step(int microbatches) {
  std::lock_guard guard(mutex_);
  progress_ = {.microbatches = microbatches};
  cancelled_ = false;
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

void ComputeSlot::acquire(plan::Phase phase, base::Microbatch microbatch) {
  std::unique_lock lock(mutex_);
  wait_for_turn(phase, microbatch, lock);
}

void ComputeSlot::queue_again(plan::Phase phase, base::Microbatch microbatch) {
  std::unique_lock lock(mutex_);
  held_ = false;
  wait_for_turn(phase, microbatch, lock);
}

void ComputeSlot::wait_for_turn(plan::Phase phase, base::Microbatch microbatch, std::unique_lock<std::mutex>& lock) {
  check_lock_order();
  Waiter self;
  self.ticket = {phase, microbatch, arrivals_++};
  waiters_.push_back(&self);
  pass_on();
  const auto ready = [&] { return self.granted || cancelled_; };
  const auto what = [&] { return base::str("turn of microbatch ", microbatch, " to compute on this rank"); };
  try {
    base::wait_until(lock, self.wake, patience_, ready, what);
  } catch (const base::TimeoutError&) {
    std::erase(waiters_, &self);
    throw;
  }
  if (self.granted) return;
  std::erase(waiters_, &self);
  throw base::CancelledError("the step was ended by an error elsewhere");
}

void ComputeSlot::release() {
  std::lock_guard guard(mutex_);
  held_ = false;
  pass_on();
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

void ComputeSlot::pass_on() {
  if (held_ || cancelled_ || waiters_.empty()) return;
  std::vector<plan::Ticket> tickets(waiters_.size());
  std::ranges::transform(waiters_, tickets.begin(), [](const Waiter* waiter) { return waiter->ticket; });
  const auto next = schedule_->pick(tickets, progress_);
  if (!next) return;
  Waiter* waiter = waiters_[*next];
  waiters_.erase(waiters_.begin() + static_cast<std::ptrdiff_t>(*next));
  if (waiter->ticket.phase == plan::Phase::kStart) ++progress_.started;
  held_ = true;
  waiter->granted = true;
  waiter->wake.notify_one();
}

}  // namespace lamina::pipeline
