// SPDX-License-Identifier: Apache-2.0
// States of a step, under mutex_:
//
//   works --wait_end(), settle()--> settled --the threads end--> idle
//     `--fail(): an error, a loss, a refusal--> failed --the threads end--> idle
//
// A step is settled once its end is known: what its threads still meet, and who leaves, changes nothing. The first
// error fails it, later ones are dropped.
//
// Threads: the one that enters the step makes it and waits. Workers run the functions of run() and serve(), and each
// keeps the step alive. The transport's thread brings messages of other ranks, and losses. Any of them may fail it.
//
// Locks: mutex_, under which a thread is started (WorkerPool). cancel() is called without it. See
// docs/thread-model.md.
#include "lamina/runtime/step_context.h"

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

StepContext::StepContext(WorkerPool& pool, Options options)
    : number_(options.number),
      pool_(pool),
      slot_(std::move(options.turns), options.timeout, pool.hooks().holds_interpreter_lock),
      recorder_(options.recorder),
      thread_state_(std::move(options.thread_state)),
      last_event_(base::Clock::now()) {
  slot_.expect(options.microbatches);
  if (options.watched) flags.emplace(std::move(options.watched));
}

void StepContext::run(std::function<void()> work) {
  std::lock_guard guard(mutex_);
  start_thread(std::move(work), Awaited::kYes);
}

void StepContext::serve(std::function<void()> work) {
  std::unique_lock lock(mutex_);
  if (error_) return;
  try {
    start_thread(std::move(work), Awaited::kNo);
  } catch (...) {  // on the transport's thread nothing may escape
    fail_locked(std::current_exception(), lock);
  }
}

void StepContext::fail(std::exception_ptr error) {
  std::unique_lock lock(mutex_);
  fail_locked(std::move(error), lock);
}

void StepContext::fail_unless_settled(std::exception_ptr error) {
  std::unique_lock lock(mutex_);
  if (!settled_) fail_locked(std::move(error), lock);
}

void StepContext::fail_thread(std::exception_ptr error) {
  std::unique_lock lock(mutex_);
  const auto over = [&] { return settled_ || error_; };
  if (tells_of_loss(error)) changed_.wait_for(lock, kExplanation, over);
  if (!over()) fail_locked(std::move(error), lock);
}

void StepContext::fail_locked(std::exception_ptr error, std::unique_lock<std::mutex>& lock) {
  if (error_) return;
  error_ = std::move(error);
  lock.unlock();
  changed_.notify_all();
  cancel();
}

std::exception_ptr StepContext::error() const {
  std::lock_guard guard(mutex_);
  return error_;
}

void StepContext::settle() {
  std::lock_guard guard(mutex_);
  settled_ = true;
  changed_.notify_all();
}

bool StepContext::settled() const {
  std::lock_guard guard(mutex_);
  return settled_;
}

void StepContext::wait_end(const base::Patience& patience, base::Rank leader, const std::function<bool()>& done) {
  std::unique_lock lock(mutex_);
  wait_locked(patience, leader, done, lock);
  if (!error_) settled_ = true;
}

void StepContext::wait(const base::Patience& patience, base::Rank leader, const std::function<bool()>& done) {
  std::unique_lock lock(mutex_);
  wait_locked(patience, leader, done, lock);
}

void StepContext::wake() {
  std::lock_guard guard(mutex_);
  changed_.notify_all();
}

void StepContext::wait_locked(const base::Patience& patience, base::Rank leader, const std::function<bool()>& done,
                              std::unique_lock<std::mutex>& lock) {
  const auto what = [&] { return base::str("end of step ", number_, ", which rank ", leader, " leads"); };
  bool told = false;
  const auto ready = [&] {
    if (error_ || settled_ || done()) return true;
    if (threads_ > 0) return false;
    const auto idle = base::Clock::now() - last_event_;
    if (idle > patience.timeout) {
      throw base::TimeoutError(base::str(what(), ": nothing happened here for the whole of timeout_s; does rank ",
                                         leader,
                                         " live, and do all ranks call the same step functions in the same order?"));
    }
    if (idle > base::kSlow && !std::exchange(told, true)) {
      base::log_warning(base::str(what(), ": nothing happened here for 10 s, still waiting"));
    }
    return false;
  };
  constexpr auto kForever = std::chrono::hours(24 * 365);  // `ready` above ends the wait
  base::wait_until(lock, changed_, {kForever, patience.check_interrupt, /*tell=*/nullptr}, ready, what);
}

void StepContext::wait_idle(const base::Patience& patience) {
  std::unique_lock lock(mutex_);
  base::wait_until(
      lock, idle_, patience, [&] { return threads_ == 0; }, [&] { return base::str("threads of step ", number_); });
}

void StepContext::close() {
  std::shared_ptr<const ThreadState> ended;  // destroyed outside the lock
  std::lock_guard guard(mutex_);
  ended.swap(thread_state_);
}

void StepContext::start_thread(std::function<void()> work, Awaited awaited) {
  ++threads_;
  last_event_ = base::Clock::now();
  auto task = [self = shared_from_this(), awaited, thread_state = thread_state_, work = std::move(work)]() mutable {
    try {
      thread_state ? thread_state->run(work) : work();
    } catch (...) {
      self->fail_thread(std::current_exception());
    }
    work = nullptr;  // its captures end before the step may
    thread_state.reset();
    std::lock_guard guard(self->mutex_);
    self->last_event_ = base::Clock::now();
    if (awaited == Awaited::kYes) self->changed_.notify_all();
    if (--self->threads_ == 0) self->idle_.notify_all();
  };
  try {
    pool_.run(std::move(task));
  } catch (...) {
    --threads_;
    throw;
  }
}

}  // namespace lamina::runtime
