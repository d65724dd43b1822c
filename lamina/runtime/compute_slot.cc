// SPDX-License-Identifier: Apache-2.0
// States of the slot, under mutex_: free, or held by one waiter that was granted it. States of a waiter:
//
//   waits --the schedule picks it--> granted --release(), queue_again()--> gone
//     `--cancel(), its deadline, the end of a Place that nobody came for--> gone
//
// Threads: contexts wait, each on a condition of its own, so that the one that is picked wakes alone. Work without a
// thread is called by the thread that gave the slot up, or that has let it wait while the slot was free. The
// transport's thread takes places for them and never waits. cancel() runs in the one that ends the step.
//
// Locks: mutex_, under which nothing else is taken: words to a team are told without it. Nobody waits here holding any
// other, or the GIL. See docs/thread-model.md.
#include "lamina/runtime/compute_slot.h"

#include <algorithm>
#include <cassert>
#include <utility>

namespace lamina::runtime {

ComputeSlot::ComputeSlot(schedule::TeamTurns turns, base::Clock::duration timeout,
                         std::function<bool()> holds_interpreter_lock)
    : turns_(std::move(turns)),
      in_team_(turns_.in_team()),
      patience_{timeout, nullptr, /*tell=*/nullptr},
      holds_interpreter_lock_(std::move(holds_interpreter_lock)) {}

void ComputeSlot::check_lock_order() const {
  assert((!holds_interpreter_lock_ || !holds_interpreter_lock_()) && "a thread waits for its turn holding the GIL");
}

template <class Act>
void ComputeSlot::act(const Act& what) {
  Lock lock(mutex_);
  what();
  tell(lock);
}

void ComputeSlot::tell(Lock& lock) {
  if (const auto on_turn = std::exchange(on_turn_, nullptr)) {
    lock.unlock();
    on_turn();
    lock.lock();
  }
  if (!in_team_ || broken_off_) return;
  const auto words = turns_.take_words();
  if (words.empty()) return;
  lock.unlock();
  for (const auto& word : words) tell_(word);
  lock.lock();
}

void ComputeSlot::hear(schedule::Pick word) {
  act([&] {
    if (broken_off_) return;
    turns_.hear(std::move(word));
    pass_on();
  });
}

void ComputeSlot::note(schedule::TurnAct made, std::string_view what) {
  act([&] {
    if (!broken_off_) turns_.note(made, what);
  });
}

void ComputeSlot::note_long_wait() {
  act([&] { turns_.note_long_wait(); });
}

bool ComputeSlot::is_held() {
  std::lock_guard guard(mutex_);
  return held_;
}

bool ComputeSlot::awaits_pick() {
  std::lock_guard guard(mutex_);
  return !held_ && !broken_off_ && !waiters_.empty() && turns_.awaits_word();
}

void ComputeSlot::break_off() {
  std::lock_guard guard(mutex_);
  broken_off_ |= in_team_;
}

std::optional<schedule::Parting> ComputeSlot::parting() {
  std::lock_guard guard(mutex_);
  return turns_.parting();
}

void ComputeSlot::follow(std::unique_ptr<schedule::Schedule> schedule) {
  std::lock_guard guard(mutex_);
  turns_.follow(std::move(schedule));
}

void ComputeSlot::expect(int microbatches) {
  std::lock_guard guard(mutex_);
  progress_.microbatches = microbatches;
}

void ComputeSlot::cancel() {
  std::list<Waiter> dropped;  // destroyed without the lock
  std::lock_guard guard(mutex_);
  cancelled_ = broken_off_ = true;
  std::erase_if(waiters_, [](const Waiter* waiter) { return waiter->on_turn != nullptr; });
  dropped.swap(without_thread_);
  for (Waiter* waiter : waiters_) waiter->wake.notify_one();
}

bool ComputeSlot::cancelled() {
  std::lock_guard guard(mutex_);
  return cancelled_;
}

void ComputeSlot::acquire(schedule::Phase phase, const schedule::TurnName& name) {
  Lock lock(mutex_);
  Waiter self;
  enqueue(self, phase, name);
  tell(lock);
  wait_for_turn(self, lock);
}

void ComputeSlot::queue_again(schedule::Phase phase, const schedule::TurnName& name) {
  Lock lock(mutex_);
  Waiter self;
  enqueue(self, phase, name);
  hand_over();
  tell(lock);
  wait_for_turn(self, lock);
}

std::shared_ptr<ComputeSlot::Place> ComputeSlot::reserve(schedule::Phase phase, const schedule::TurnName& name) {
  auto place = std::make_shared<Place>(*this);
  act([&] { enqueue(place->waiter_, phase, name); });
  return place;
}

void ComputeSlot::acquire(Place& place) {
  Lock lock(mutex_);
  place.taken_ = true;
  wait_for_turn(place.waiter_, lock);
}

void ComputeSlot::reserve(schedule::Phase phase, base::Microbatch microbatch, std::function<void()> on_turn) {
  act([&] {
    if (cancelled_) return;
    without_thread_.emplace_back().on_turn = std::move(on_turn);
    enqueue(without_thread_.back(), phase, {microbatch});
  });
}

void ComputeSlot::abandon(Waiter& waiter) {
  act([&] {
    std::erase(waiters_, &waiter);
    if (!waiter.granted) return;
    broken_off_ |= in_team_;  // the step has failed: no thread comes for it
    held_ = false;
    pass_on();
  });
}

void ComputeSlot::enqueue(Waiter& waiter, schedule::Phase phase, const schedule::TurnName& name) {
  waiter.ticket = {phase, name.microbatch, arrivals_++};
  waiter.name = name;
  waiters_.push_back(&waiter);
  pass_on();
}

void ComputeSlot::wait_for_turn(Waiter& self, Lock& lock) {
  check_lock_order();
  const auto ready = [&] { return self.granted || cancelled_; };
  const auto what = [&] {
    const auto awaited = turns_.awaited();
    return base::str("turn of microbatch ", self.ticket.microbatch, " to compute on this rank",
                     awaited ? base::str(", where the team's first rank has begun ", *awaited) : "");
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
  Lock lock(mutex_);
  const bool taken = hand_over();
  tell(lock);
  lock.unlock();
  if (!taken) idle_();
}

void ComputeSlot::forward_done() {
  act([&] {
    ++progress_.forward_done;
    pass_on();
  });
}

void ComputeSlot::finished() {
  act([&] {
    ++progress_.finished;
    pass_on();
  });
}

void ComputeSlot::hold_starts(bool hold) {
  act([&] {
    holds_starts_ = hold;
    pass_on();
  });
}

bool ComputeSlot::hand_over() {
  if (processor_) processor_->leave();
  held_ = false;
  pass_on();
  return held_;
}

void ComputeSlot::pass_on() {
  if (held_ || broken_off_ || (waiters_.empty() && !in_team_)) return;
  std::vector<Waiter*> ready;
  std::ranges::copy_if(waiters_, std::back_inserter(ready), [&](const Waiter* waiter) {
    return !holds_starts_ || waiter->ticket.phase != schedule::Phase::kStart;
  });
  std::vector<schedule::Ticket> tickets(ready.size());
  std::ranges::transform(ready, tickets.begin(), [](const Waiter* waiter) { return waiter->ticket; });
  std::vector<schedule::TurnName> names(ready.size());
  std::ranges::transform(ready, names.begin(), [](const Waiter* waiter) { return waiter->name; });
  auto progress = progress_;
  if (holds_starts_) progress.microbatches = progress.started;  // nobody is to wait for those
  const auto next = turns_.pick(tickets, names, progress);
  if (!next) return;
  Waiter* waiter = ready[*next];
  std::erase(waiters_, waiter);
  progress_.go_on(waiter->ticket);
  held_ = true;
  if (waiter->on_turn) {
    // Its turn is the backward itself, where a thread's goes on with it in later ones.
    if (waiter->ticket.phase == schedule::Phase::kBackwardStart) {
      progress_.go_on({schedule::Phase::kBackward, waiter->ticket.microbatch});
    }
    on_turn_ = std::move(waiter->on_turn);
    std::erase_if(without_thread_, [&](const Waiter& one) { return &one == waiter; });
    return;
  }
  waiter->granted = true;
  waiter->wake.notify_one();
}

}  // namespace lamina::runtime
