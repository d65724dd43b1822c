// SPDX-License-Identifier: Apache-2.0
#include "lamina/collective/lane.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "lamina/base/error.h"
#include "lamina/base/str.h"
#include "lamina/base/wait.h"

namespace lamina::collective {
namespace {

thread_local const Lane* served_here = nullptr;

[[noreturn]] void refuse_forked(const char* name) {
  throw base::UsageError(base::str(name, " in a child of fork(): its group is its parent's; make one of its own"));
}

}  // namespace

LaneWork::LaneWork(LaneOperation operation)
    : Work(-1, operation.type),
      operation_(std::move(operation)),
      future_(c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()))) {}

void LaneWork::queue_in(Lane& lane) {
  lane_ = &lane;
  queued_ = base::Clock::now();
}

bool LaneWork::run(bool here, Time moved) {
  const auto begin = std::max(queued_, moved);
  const auto deadline = base::Deadline::after(begin + operation_.timeout - base::Clock::now());
  bool in_time = true;
  const auto check = [&](const std::string& awaited) {
    if (here && !awaited.empty() && operation_.check_interrupt) operation_.check_interrupt();
    if (aborted_) throw base::CancelledError(base::str(operation_.name, " was aborted"));
    if (!deadline.expired()) return;
    in_time = false;
    const auto seconds = static_cast<double>(operation_.timeout.count()) / 1000;
    throw base::TimeoutError(
        awaited.empty() ? base::str(operation_.name, " has waited for ", seconds, " s behind one that timed out")
                        : base::str(operation_.name, ": ", awaited, " has not come for ", seconds,
                                    " s; raise the group's timeout if it needs longer"));
  };
  std::exception_ptr error;
  try {
    const at::AutoDispatchBelowADInplaceOrView writes_to_leaves;
    operation_.run(check);
  } catch (...) {
    error = std::current_exception();
  }
  operation_.run = nullptr;  // with the tensors that it keeps
  // Waits for the future end first, as Gloo's do.
  if (error) {
    future_->setError(error);
  } else {
    future_->markCompleted(c10::IValue(operation_.results));
  }
  finish(error);
  return in_time;
}

bool LaneWork::wait(std::chrono::milliseconds timeout) {
  if (process_.forked()) refuse_forked(operation_.name);
  at::RecordFunction record(at::RecordScope::USER_SCOPE);
  if (record.isActive()) record.before("lamina:wait");
  if (lane_ != nullptr && lane_ == served_here) lane_->run_up_to(*this);
  std::optional<base::Deadline> deadline;
  if (timeout != kNoTimeout) deadline = base::Deadline::after(timeout);
  std::unique_lock lock(mutex_);
  while (!cv_.wait_for(lock, base::kInterruptSlice, [&] { return completed_; })) {
    if (deadline && deadline->expired()) {
      throw base::TimeoutError(
          base::str(operation_.name, " has not ended in ", static_cast<double>(timeout.count()) / 1000, " s"));
    }
    lock.unlock();
    try {
      if (operation_.check_interrupt) operation_.check_interrupt();
    } catch (...) {
      if (operation_.synchronous) abort();
      throw;
    }
    lock.lock();
  }
  if (exception_) std::rethrow_exception(exception_);
  return true;
}

void Lane::run(const LaneWorkPtr& work, bool here) {
  if (process_.forked()) refuse_forked(work->name());
  std::unique_lock lock(mutex_);
  if (closing_) {
    throw base::UsageError(base::str(work->name(), " of a group that was destroyed"), base::Code{"group-destroyed"});
  }
  if (running_ && caller_ == std::this_thread::get_id()) {
    throw base::UsageError(
        "a signal's handler has called a collective of a group in which it interrupted another one: "
        "set a flag there, and call it after that one");
  }
  work->queue_in(*this);
  if (served_here == this) {
    waiting_.push_back(work);
    run_up_to(*work, lock);
    return;
  }
  if (here && !running_ && waiting_.empty()) {
    running_ = work;
    caller_ = std::this_thread::get_id();
    const auto moved = moved_;
    lock.unlock();
    const bool in_time = work->run(/*here=*/true, moved);
    lock.lock();
    if (in_time) moved_ = base::Clock::now();
    running_.reset();
    caller_ = {};
  } else {
    waiting_.push_back(work);
    if (!thread_.joinable()) thread_ = std::thread([self = shared_from_this()] { self->serve(); });
  }
  lock.unlock();
  changed_.notify_all();
}

bool Lane::runs_here() { return served_here != nullptr; }

bool Lane::idle() {
  const std::lock_guard guard(mutex_);
  return !running_ && waiting_.empty();
}

void Lane::abort() {
  if (process_.forked()) return;
  const std::lock_guard guard(mutex_);
  abort_all();
}

void Lane::abort_all() {
  if (running_) running_->abort();
  for (const auto& work : waiting_) work->abort();
}

void Lane::drain(const std::function<void()>& check_interrupt) {
  if (process_.forked()) return;
  std::unique_lock lock(mutex_);
  if (served_here == this) {
    while (!waiting_.empty()) run_next(lock);
    return;
  }
  while (!changed_.wait_for(lock, base::kInterruptSlice, [&] { return !running_ && waiting_.empty(); })) {
    if (!check_interrupt) continue;
    lock.unlock();
    check_interrupt();
    lock.lock();
  }
}

void Lane::close() {
  if (process_.forked()) return;
  std::unique_lock lock(mutex_);
  closing_ = true;
  abort_all();
  if (served_here == this) {  // in what an operation's end calls: the thread ends after it
    while (!waiting_.empty()) run_next(lock);
    if (thread_.joinable()) thread_.detach();
    return;
  }
  lock.unlock();
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void Lane::run_up_to(c10d::Work& work) {
  std::unique_lock lock(mutex_);
  run_up_to(work, lock);
}

void Lane::run_up_to(c10d::Work& work, std::unique_lock<std::mutex>& lock) {
  while (!waiting_.empty() && !work.isCompleted()) run_next(lock);
}

void Lane::serve() {
  served_here = this;
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return !running_ && (closing_ || !waiting_.empty()); });
    if (waiting_.empty()) return;
    run_next(lock);
  }
}

// In the lane's thread.
void Lane::run_next(std::unique_lock<std::mutex>& lock) {
  auto work = std::move(waiting_.front());
  waiting_.pop_front();
  auto outer = std::exchange(running_, work);
  const auto moved = moved_;
  lock.unlock();
  const bool in_time = work->run(/*here=*/false, moved);
  work.reset();  // the tensors of a result may go with it
  lock.lock();
  if (in_time) moved_ = base::Clock::now();
  running_ = std::move(outer);
  changed_.notify_all();
}

}  // namespace lamina::collective
