// SPDX-License-Identifier: Apache-2.0
// States of the step, under mutex_:
//
//   none --begin()--> open --announced--> begun --what came before--> caught up --end()--> none
//                       `--retract()--> retracted --end()--> none, and the next one has its number
//
// The rank that leads announces its step as it opens it. What other ranks send in a step that is not begun here waits
// in coming_, by the step's number; so a retracted step gets nothing of the next one that has its number.
//
// Threads: the main thread begins and ends; the transport's brings what others announce and send. Either hands out what
// has waited, whichever learns that the step has begun; meanwhile what comes waits behind it.
//
// Locks: mutex_; begin() makes the step under it, so that no message meets half of one. Handlers, and what fails a
// step, run without it. See docs/thread-model.md.
#include "lamina/remote/steps.h"

#include "lamina/base/error.h"

namespace lamina::remote {

std::shared_ptr<StepScope> Steps::begin(const Make& make, const base::Call& entered, bool leads) {
  std::unique_lock lock(mutex_);
  if (open_) {
    throw base::UsageError("a step inside a step: call the inner step function outside the outer one",
                           base::Code{"step-nested"});
  }
  const base::Step step(current_.value + 1);
  const auto opened = make(step);
  current_ = step;
  open_ = opened;
  entered_ = entered;
  begun_ = leads;
  caught_up_ = retracted_ = false;
  refusal_.clear();
  std::exception_ptr error;
  if (!coming_[step].end) error = late_ ? std::exchange(late_, nullptr) : for_good_;
  if (!begun_) compare();
  if (!error && !refusal_.empty())
    error = std::make_exception_ptr(base::DesyncError(refusal_, base::Code{"step-mismatch"}));
  if (error) opened->fail(error);
  catch_up(lock);
  return opened;
}

void Steps::end() {
  std::shared_ptr<StepScope> ended;
  std::lock_guard guard(mutex_);
  ended.swap(open_);
  std::erase_if(left_, [](const auto& step) { return step.expired(); });
  left_.push_back(ended);
  if (retracted_) {
    --current_.value;
  } else {
    coming_.erase(current_);
  }
}

std::shared_ptr<StepScope> Steps::open() {
  std::lock_guard guard(mutex_);
  return open_;
}

std::shared_ptr<StepScope> Steps::find(base::Step step) {
  std::lock_guard guard(mutex_);
  return step == current_ ? open_ : nullptr;
}

base::Step Steps::latest() {
  std::lock_guard guard(mutex_);
  return current_;
}

std::optional<base::Step> Steps::begun() {
  std::lock_guard guard(mutex_);
  return open_ && begun_ ? std::optional(current_) : std::nullopt;
}

base::Call Steps::entered() {
  std::lock_guard guard(mutex_);
  return entered_;
}

void Steps::compare() {
  const auto found = coming_.find(current_);
  if (found == coming_.end() || !found->second.announced) return;
  const auto& [leader, announced, first_split] = *found->second.announced;
  if (announced.name == entered_.name || announced.name.empty() || entered_.name.empty()) {
    begun_ = true;
    open_->first_split = first_split;
    return;
  }
  const auto at = [](const base::Call& call) { return call.where.empty() ? "" : base::str(" at ", call.where); };
  refusal_ = base::str("step ", current_, ": rank ", leader, " has entered the step function ", announced.name,
                       at(announced), ", rank ", rank_, " ", entered_.name, at(entered_),
                       ": all ranks of a pipeline call the same step functions, in the same order");
}

// Hands out what came before the step had begun, and what comes meanwhile. Its end is the last thing that is said of
// it.
void Steps::catch_up(std::unique_lock<std::mutex>& lock) {
  if (std::exchange(catching_up_, true)) return;  // the other one goes on with what is here now
  while (open_ && begun_ && !caught_up_) {
    const auto step = open_;
    auto& coming = coming_[step->number()];
    auto messages = std::exchange(coming.messages, {});
    if (messages.empty()) {
      caught_up_ = true;
      if (coming.end) step->settle();
      break;
    }
    lock.unlock();
    for (auto& [handle, message] : messages) {
      try {
        handle(*step, std::move(message));
      } catch (...) {
        step->fail(std::current_exception());
      }
    }
    lock.lock();
  }
  catching_up_ = false;
}

void Steps::deliver(transport::Message&& message, Handle handle) {
  const auto number = message.call.step;
  std::unique_lock lock(mutex_);
  if (number < current_ || (number == current_ && !open_)) return;
  if (number != current_ || !caught_up_ || !open_) {
    coming_[number].messages.emplace_back(std::move(handle), std::move(message));
    return;
  }
  const auto step = open_;
  lock.unlock();
  handle(*step, std::move(message));
}

void Steps::announce(base::Step step, Announced announced) {
  std::unique_lock lock(mutex_);
  if (step < current_ || (step == current_ && !open_)) return;
  coming_[step].announced = std::move(announced);
  if (step > current_ || retracted_ || begun_) return;
  compare();
  if (begun_) return catch_up(lock);
  const auto refused = open_;
  const auto error = std::make_exception_ptr(base::DesyncError(refusal_, base::Code{"step-mismatch"}));
  lock.unlock();
  refused->fail(error);
}

void Steps::refuse(base::Step step, const std::string& why) {
  const auto error = std::make_exception_ptr(base::DesyncError(why, base::Code{"step-mismatch"}));
  std::unique_lock lock(mutex_);
  if (step > current_) return;
  const auto open = open_;
  if (!open || open->settled()) {
    late_ = error;
    return;
  }
  lock.unlock();
  open->fail_unless_settled(error);
}

std::string Steps::refusal() {
  std::lock_guard guard(mutex_);
  return refusal_;
}

void Steps::receive_end(transport::Message&& end) {
  const auto number = end.call.step;
  std::unique_lock lock(mutex_);
  if (number < current_ || (number == current_ && !open_)) return;
  auto& kept = coming_[number].end;
  if (!kept) kept = std::move(end);
  if (number != current_ || !caught_up_) return;
  const auto step = open_;
  lock.unlock();
  step->settle();
}

std::optional<transport::Message> Steps::take_end() {
  std::lock_guard guard(mutex_);
  const auto found = caught_up_ ? coming_.find(current_) : coming_.end();
  if (found == coming_.end() || !found->second.end) return std::nullopt;
  return std::move(*found->second.end);
}

void Steps::retract() {
  std::lock_guard guard(mutex_);
  retracted_ = open_ && !begun_;
}

bool Steps::retracted() {
  std::lock_guard guard(mutex_);
  return retracted_;
}

void Steps::skip(base::Step step) {
  std::lock_guard guard(mutex_);
  if (open_ || step <= current_) return;
  current_ = step;
  std::erase_if(coming_, [&](const auto& one) { return one.first <= step; });
}

void Steps::fail_for_good(std::exception_ptr error) {
  std::unique_lock lock(mutex_);
  if (!for_good_) for_good_ = error;
  // Other ranks may leave as soon as the end of the step is said, which this one may still have to catch up with.
  const auto kept = coming_.find(current_);
  const auto open = kept != coming_.end() && kept->second.end ? nullptr : open_;
  lock.unlock();
  if (open) open->fail_unless_settled(error);
}

bool Steps::failed_for_good() {
  std::lock_guard guard(mutex_);
  return for_good_ != nullptr;
}

void Steps::wait_idle(const base::Patience& patience) {
  std::unique_lock lock(mutex_);
  auto all = left_;
  all.push_back(open_);
  lock.unlock();
  for (const auto& each : all) {
    if (const auto step = each.lock()) step->wait_idle(patience);
  }
}

}  // namespace lamina::remote
