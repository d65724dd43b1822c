// SPDX-License-Identifier: Apache-2.0
// States of a remote value, under mutex_:
//
//   elsewhere --take()--> fetched by one thread (taking_) --> here (value_), or what came instead (error_)
//      ^--------- the step was ended ----------'
//
// Threads: any context of the rank. Threads that come while another one fetches wait for it, without the lock and
// without the compute slot: the other one may need that.
//
// Locks: mutex_; under it, so that each reader's value is asked for once, those of the calls and of what they learned,
// and the transport's to send. See docs/thread-model.md.
#include "lamina/remote/remote_value.h"

#include <algorithm>

#include "lamina/base/str.h"
#include "lamina/runtime/execution_context.h"

namespace lamina::remote {

std::string IssuedCall::what() const {
  return base::str(backward ? "backward" : "forward", " of ", name, " on rank ", owner, " (step ", id.step,
                   ", microbatch ", id.microbatch, ")");
}

void Releases::add(base::Rank owner, const Release& release) {
  std::lock_guard guard(mutex_);
  waiting_[owner].push_back(release);
}

std::vector<Release> Releases::take(base::Rank owner) {
  std::lock_guard guard(mutex_);
  return std::exchange(waiting_[owner], {});
}

RemoteValue::RemoteValue(Fetcher& calls, std::weak_ptr<const bool> alive, std::shared_ptr<const IssuedCall> call,
                         std::shared_ptr<const Lease> lease, std::int64_t output, std::vector<Delivery> prepared)
    : calls_(calls),
      alive_(std::move(alive)),
      call_(std::move(call)),
      lease_(std::move(lease)),
      output_(output),
      prepared_(std::move(prepared)) {}

RemoteValue::~RemoteValue() {
  if (!call_->profile || call_->backward) return;
  for (const auto& unclaimed : prepared_) call_->profile->forget_reader(call_->ordinal, output_, unclaimed.to);
}

at::Tensor RemoteValue::take() {
  std::unique_lock lock(mutex_);
  bool gave_way =
      !calls_.ends_turns();  // else it has to once, also where a thread has fetched it that computes no more
  while (!taken_) {
    if (error_) std::rethrow_exception(error_);
    if (value_.defined() && gave_way) break;
    require_alive();
    gave_way = true;
    value_.defined() || taking_ ? wait_for_taker(lock) : fetch(lock);
  }
  if (runtime::ExecutionContext::has_process_state()) taken_ = true;
  return value_;
}

// Without the lock: whoever has the compute slot may come for it.
void RemoteValue::wait_for_taker(std::unique_lock<std::mutex>& lock) {
  lock.unlock();
  calls_.give_way(*call_, [&](const std::function<void()>&) {
    std::unique_lock waiting(mutex_);
    base::wait_until(waiting, changed_, calls_.patience(), [&] { return !taking_; }, [&] { return call_->what(); });
  });
  lock.lock();
}

void RemoteValue::fetch(std::unique_lock<std::mutex>& lock) {
  taking_ = true;
  std::exception_ptr error;
  try {
    const auto name = route(calls_.rank());
    lock.unlock();
    const auto value = calls_.receive(name, *call_);
    lock.lock();
    value_ = value;
  } catch (const base::CancelledError&) {  // no property of the value: a later step says what has become of it
    error = std::current_exception();
  } catch (...) {
    error = error_ = std::current_exception();
  }
  if (!lock.owns_lock()) lock.lock();
  taking_ = false;
  changed_.notify_all();
  if (error) std::rethrow_exception(error);
}

base::CallId RemoteValue::route_to(base::Rank reader) {
  std::lock_guard guard(mutex_);
  require_alive();
  return route(reader);
}

void RemoteValue::redirect(Delivery delivery) {
  require_alive();
  delivery.output = output_;
  calls_.ask(*call_, std::move(delivery));
}

base::CallId RemoteValue::route(base::Rank reader) {
  const auto found = std::ranges::find(prepared_, reader, &Delivery::to);
  if (found != prepared_.end()) {
    const auto name = found->name;
    prepared_.erase(found);
    return name;
  }
  const auto name = calls_.new_delivery(*call_);
  if (!call_->backward) call_->profile->learn_reader(call_->ordinal, output_, reader);
  calls_.ask(*call_, {output_, reader, name});
  return name;
}

void RemoteValue::require_alive() const {
  if (alive_.expired())
    throw base::UsageError(base::str("a result of the ", call_->what(), ", whose job was shut down"),
                           base::Code{"step-after-shutdown"});
}

std::shared_ptr<RemoteValue> remote_value_of(const at::Tensor& tensor) {
  return std::dynamic_pointer_cast<RemoteValue>(value::source_of(tensor));
}

}  // namespace lamina::remote
