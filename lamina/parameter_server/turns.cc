// SPDX-License-Identifier: Apache-2.0
// Locks: mutex_, under which nothing else is taken. Whoever waits here holds nothing else, but the state of its call.
#include "lamina/parameter_server/turns.h"

#include <exception>

namespace lamina::parameter_server {
namespace {

thread_local Turns::Turn* current = nullptr;

}  // namespace

Turns::Turn::Turn(Turns& turns, const base::Patience& patience) : turns_(turns), patience_(patience), outer_(current) {
  std::int64_t ticket = 0;
  {
    const std::lock_guard guard(turns_.mutex_);
    ticket = ++turns_.tickets_;
    turns_.waiting_.insert(ticket);
  }
  turns_.take(ticket, patience_);
  current = this;
}

Turns::Turn::~Turn() {
  current = outer_;
  turns_.give();
}

Turns::Pause::Pause() : turn_(current) {
  if (turn_ != nullptr) turn_->turns_.give();
}

Turns::Pause::~Pause() {
  if (turn_ == nullptr) return;
  Turns& turns = turn_->turns_;
  std::unique_lock lock(turns.mutex_);
  const auto ticket = -++turns.returns_;
  turns.waiting_.insert(ticket);
  // No deadline: whoever has the turn gives it back at the end of its call, or in a wait that has one.
  turns.changed_.wait(lock, [&] { return !turns.taken_ && *turns.waiting_.begin() == ticket; });
  turns.waiting_.erase(ticket);
  turns.taken_ = true;
}

void Turns::take(std::int64_t ticket, const base::Patience& patience) {
  std::unique_lock lock(mutex_);
  try {
    base::wait_until(
        lock, changed_, patience, [&] { return !taken_ && *waiting_.begin() == ticket; },
        [] { return "the end of calls that came before"; });
  } catch (...) {
    if (!lock.owns_lock()) lock.lock();
    waiting_.erase(ticket);
    changed_.notify_all();
    throw;
  }
  waiting_.erase(ticket);
  taken_ = true;
}

void Turns::give() {
  const std::lock_guard guard(mutex_);
  taken_ = false;
  changed_.notify_all();
}

}  // namespace lamina::parameter_server
