// SPDX-License-Identifier: Apache-2.0
// States of the step, under mutex_:
//
//   none --begin()--> open --announced--> begun --wait_end()--> settled --wait_idle(), end()--> none
//                       |                   `--fail(), a loss, a refusal--> failed --wait_idle(), end()--^
//                       `--retract()--> retracted --end()--> none, and the next one has its number
//
// The rank that leads announces its step as it opens it. What other ranks set off in a step that is not begun here
// waits in early_. A step is settled once its end is known: what its threads still meet, and who leaves, changes
// nothing. The first error fails it, later ones are dropped.
//
// Threads: the main thread begins, waits and ends; workers run what run() is given; the transport's thread brings what
// other ranks announce and set off, and losses. Any of them may fail the step.
//
// Locks: mutex_; under it begin() has everybody forget the last step (slot, Inbox, RemoteCalls), and run() makes a
// request a thread (Bursts, slot, WorkerPool). on_error_ is called without it. See docs/thread-model.md.
#include "lamina/runtime/step_state.h"

#include <chrono>

#include "lamina/base/error.h"

namespace lamina::runtime {
namespace {

// A rank to whom something could not be sent may have left because the step has failed: whoever leads, or has noticed
// the loss, says so.
constexpr std::chrono::milliseconds kExplanation(1000);

bool tells_of_loss(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const base::PeerError&) {
    return true;
  } catch (...) {
    return false;
  }
}

}  // namespace

base::Step StepState::begin(const std::function<void(base::Step)>& prepare, const base::Call& entered, bool leads) {
  auto ambient = Ambient::capture(pool_.hooks());
  std::unique_lock lock(mutex_);
  if (open_)
    throw base::UsageError("a step inside a step: call the inner step function outside the outer one",
                           base::Code{"step-nested"});
  const auto step = current_ = base::Step(current_.value + 1);
  open_ = true;
  error_ = ends_.contains(step) ? nullptr : late_ ? std::exchange(late_, nullptr) : for_good_;
  done_ = retracted_ = false;
  begun_ = leads;
  entered_ = entered;
  refusal_.clear();
  ambient_ = std::move(ambient);
  last_event_ = base::Deadline::Clock::now();
  prepare(step);
  compare();
  if (!refusal_.empty() && !error_)
    error_ = std::make_exception_ptr(base::DesyncError(refusal_, base::Code{"step-mismatch"}));
  start_early(lock);
  return step;
}

void StepState::compare() {
  const auto found = begins_.find(current_);
  if (found == begins_.end() || begun_) return;
  const auto& [leader, announced] = found->second;
  if (announced.name == entered_.name || announced.name.empty() || entered_.name.empty()) {
    begun_ = true;
    return;
  }
  const auto at = [](const base::Call& call) { return call.where.empty() ? "" : base::str(" at ", call.where); };
  refusal_ = base::str("step ", current_, ": rank ", leader, " has entered the step function ", announced.name,
                       at(announced), ", rank ", rank_, " ", entered_.name, at(entered_),
                       ": all ranks of a pipeline call the same step functions, in the same order");
}

// What came before the step had begun here.
void StepState::start_early(std::unique_lock<std::mutex>& lock) {
  if (!begun_) return;
  auto early = std::move(early_[current_]);
  early_.erase(current_);
  try {
    for (auto& ready : early) {
      if (!error_) start_thread(ready(), Awaited::kNo);
    }
  } catch (...) {
    fail_locked(std::current_exception(), lock);
  }
}

void StepState::receive_begin(base::Step step, base::Rank leader, const base::Call& announced) {
  std::unique_lock lock(mutex_);
  if (step < current_ || (step == current_ && !open_)) return;
  begins_[step] = {leader, announced};
  if (step > current_ || retracted_) return;
  compare();
  if (!refusal_.empty())
    return fail_locked(std::make_exception_ptr(base::DesyncError(refusal_, base::Code{"step-mismatch"})), lock);
  start_early(lock);
}

void StepState::refuse(base::Step step, const std::string& why) {
  std::unique_lock lock(mutex_);
  const auto error = std::make_exception_ptr(base::DesyncError(why, base::Code{"step-mismatch"}));
  if (open_ && step <= current_ && !settled()) {
    fail_locked(error, lock);
  } else if (step <= current_) {
    late_ = error;
  }
}

std::string StepState::refusal() {
  std::lock_guard guard(mutex_);
  return refusal_;
}

std::optional<base::Step> StepState::begun() {
  std::lock_guard guard(mutex_);
  return open_ && begun_ ? std::optional(current_) : std::nullopt;
}

base::Call StepState::entered() {
  std::lock_guard guard(mutex_);
  return entered_;
}

void StepState::retract() {
  std::lock_guard guard(mutex_);
  retracted_ = open_ && !begun_;
}

bool StepState::retracted() {
  std::lock_guard guard(mutex_);
  return retracted_;
}

void StepState::skip(base::Step step) {
  std::lock_guard guard(mutex_);
  if (open_ || step <= current_) return;
  current_ = step;
  std::erase_if(begins_, [&](const auto& one) { return one.first <= step; });
  std::erase_if(ends_, [&](const auto& one) { return one.first <= step; });
  std::erase_if(early_, [&](const auto& one) { return one.first <= step; });
}

void StepState::end() {
  std::shared_ptr<const Ambient> ended;  // destroyed outside the lock: it may hold objects of Python
  std::lock_guard guard(mutex_);
  open_ = false;
  error_ = nullptr;
  ended.swap(ambient_);
  if (retracted_) {
    --current_.value;
    return;
  }
  ends_.erase(current_);
  begins_.erase(current_);
  early_.erase(current_);
}

bool StepState::is_open() {
  std::lock_guard guard(mutex_);
  return open_;
}

void StepState::run(std::function<void()> work) {
  std::lock_guard guard(mutex_);
  start_thread(std::move(work), Awaited::kYes);
}

void StepState::run(base::Step step, Ready ready) {
  std::unique_lock lock(mutex_);
  if (open_ && step == current_ && begun_) {
    if (error_) return;
    try {
      start_thread(ready(), Awaited::kNo);
    } catch (...) {  // on the transport's thread nothing may escape
      fail_locked(std::current_exception(), lock);
    }
  } else if (step > current_ || (open_ && step == current_ && (retracted_ || !error_))) {
    early_[step].push_back(std::move(ready));
  }
}

void StepState::receive_end(transport::Message&& end) {
  const auto step = end.call.step;
  {
    std::lock_guard guard(mutex_);
    if (step < current_ || (step == current_ && !open_)) return;
    ends_.try_emplace(step, std::move(end));
  }
  changed_.notify_all();
}

void StepState::fail(base::Step step, std::exception_ptr error) {
  std::unique_lock lock(mutex_);
  if (open_ && step == current_) fail_locked(std::move(error), lock);
}

void StepState::fail_thread(base::Step step, std::exception_ptr error) {
  std::unique_lock lock(mutex_);
  const auto over = [&] { return !open_ || step != current_ || settled() || error_; };
  if (tells_of_loss(error)) changed_.wait_for(lock, kExplanation, over);
  if (!over()) fail_locked(std::move(error), lock);
}

void StepState::fail_for_good(std::exception_ptr error) {
  std::unique_lock lock(mutex_);
  if (!for_good_) for_good_ = error;
  // Other ranks may leave as soon as the step is settled.
  if (open_ && !settled()) fail_locked(std::move(error), lock);
}

void StepState::fail_locked(std::exception_ptr error, std::unique_lock<std::mutex>& lock) {
  if (error_) return;
  error_ = std::move(error);
  ++threads_;  // the step does not end before this has: it would wake those who wait in the next one
  lock.unlock();
  changed_.notify_all();
  on_error_();
  lock.lock();
  if (--threads_ == 0) idle_.notify_all();
  lock.unlock();
}

bool StepState::settled() const { return done_ || ends_.contains(current_); }

base::Step StepState::latest() {
  std::lock_guard guard(mutex_);
  return current_;
}

void StepState::lose(const base::Loss& loss) {
  fail_for_good(std::make_exception_ptr(base::PeerError(base::str(loss.text(), "; start the job again"), loss)));
}

std::exception_ptr StepState::error() {
  std::lock_guard guard(mutex_);
  return error_;
}

bool StepState::failed_for_good() {
  std::lock_guard guard(mutex_);
  return for_good_ != nullptr;
}

std::optional<transport::Message> StepState::wait_end(const base::Patience& patience, base::Rank leader,
                                                      const std::function<bool()>& done) {
  std::unique_lock lock(mutex_);
  const auto what = [&] { return base::str("end of step ", current_, ", which rank ", leader, " leads"); };
  bool told = false;
  const auto ready = [&] {
    if (error_ || ends_.contains(current_) || done()) return true;
    if (threads_ > 0) return false;
    const auto idle = base::Deadline::Clock::now() - last_event_;
    if (idle > patience.timeout) {
      throw base::TimeoutError(base::str(what(), ": nothing happened here for the whole of timeout_s; does rank ",
                                         leader,
                                         " live, and do all ranks call the same step functions in the same "
                                         "order?"));
    }
    if (idle > base::kSlow && !std::exchange(told, true)) {
      base::log_warning(base::str(what(), ": nothing happened here for 10 s, still waiting"));
    }
    return false;
  };
  constexpr auto kForever = std::chrono::hours(24 * 365);  // `ready` above ends the wait
  base::wait_until(lock, changed_, {kForever, patience.check_interrupt, /*tell=*/nullptr}, ready, what);
  if (error_) return std::nullopt;
  done_ = true;
  const auto found = ends_.find(current_);
  if (found == ends_.end()) return std::nullopt;
  return std::move(found->second);
}

void StepState::wait_idle(const base::Patience& patience) {
  std::unique_lock lock(mutex_);
  base::wait_until(
      lock, idle_, patience, [&] { return threads_ == 0; }, [&] { return base::str("threads of step ", current_); });
}

void StepState::start_thread(std::function<void()> work, Awaited awaited) {
  ++threads_;
  last_event_ = base::Deadline::Clock::now();
  auto task = [this, awaited, step = current_, ambient = ambient_, work = std::move(work)]() mutable {
    try {
      ambient->run(work);
    } catch (...) {
      fail_thread(step, std::current_exception());
    }
    work = nullptr;  // its captures end before the step may
    ambient.reset();
    std::lock_guard guard(mutex_);
    last_event_ = base::Deadline::Clock::now();
    // Under the lock: once it is free, this may be destroyed.
    if (awaited == Awaited::kYes) changed_.notify_all();
    if (--threads_ == 0) idle_.notify_all();
  };
  try {
    pool_.run(std::move(task));
  } catch (...) {
    --threads_;
    throw;
  }
}

}  // namespace lamina::runtime
