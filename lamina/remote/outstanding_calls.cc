// SPDX-License-Identifier: Apache-2.0
// States of a call here (PendingCall, under mutex_):
//
//   added --Answer--> answered --Answer that is done--> done, and out of pending_
//     `---- the first Answer is done, or a failure ----^
//
// An answer to a call that was predicted says only that it is done. cancel() wakes whoever waits in any state, with a
// CancelledError.
//
// Threads: contexts add and wait; answer() runs in the transport's thread, cancel() in the one that ends the step.
//
// Locks: mutex_; under it only the compute slot's, as an answer takes the place of the thread that waits for it. See
// docs/thread-model.md.
#include "lamina/remote/outstanding_calls.h"

#include <algorithm>
#include <set>

namespace lamina::remote {
namespace {

[[noreturn]] void throw_cancelled() { throw base::CancelledError("the step was ended by an error elsewhere"); }

}  // namespace

base::CallId OutstandingCalls::new_call(base::Rank rank, base::Step step, base::Microbatch microbatch) {
  std::lock_guard guard(mutex_);
  return {rank, step, microbatch, call_counts_[microbatch]++};
}

base::CallId OutstandingCalls::new_delivery(base::Rank rank, base::Step step, base::Microbatch microbatch) {
  std::lock_guard guard(mutex_);
  return {rank, step, microbatch, --delivery_counts_[microbatch]};
}

void OutstandingCalls::add(const Pending& pending) {
  std::lock_guard guard(mutex_);
  pending_[pending->call->id] = pending;
}

void OutstandingCalls::answer(Answer&& answer) {
  std::unique_lock lock(mutex_);
  const auto found = pending_.find(answer.call);
  if (found == pending_.end()) return;  // the step is over
  const auto pending = found->second;
  const bool done = answer.done || answer.failure;
  if (answer.failure) {
    pending->failure = std::move(answer.failure);
  } else if (!answer.result.get_if<value::None>()) {
    pending->answer = std::move(answer.result);
  }
  if (pending->ready && (pending->answer || pending->failure)) std::exchange(pending->ready, nullptr)();
  if (done) {
    pending->done = true;
    pending_.erase(found);
  }
  lock.unlock();  // which the woken thread takes
  pending->changed.notify_all();
}

std::optional<value::Failure> OutstandingCalls::wait_answer(PendingCall& pending, const base::Patience& patience,
                                                            const std::function<void()>& ready) {
  std::unique_lock lock(mutex_);
  const auto ended = [&] { return pending.answer || pending.failure || cancelled_; };
  if (!ended()) pending.ready = ready;
  try {
    base::wait_until(lock, pending.changed, patience, ended, [&] { return pending.call->what(); });
  } catch (const base::TimeoutError&) {
    pending.ready = nullptr;
    throw;
  }
  pending.ready = nullptr;
  if (!pending.answer && !pending.failure) throw_cancelled();
  return pending.failure;
}

void OutstandingCalls::wait_done(PendingCall& pending, const base::Patience& patience) {
  std::unique_lock lock(mutex_);
  base::wait_until(
      lock, pending.changed, patience, [&] { return pending.done || cancelled_; },
      [&] { return pending.call->what(); });
  if (!pending.done) throw_cancelled();
}

bool OutstandingCalls::all_done(const std::vector<Pending>& calls) {
  std::lock_guard guard(mutex_);
  return std::ranges::all_of(calls, [](const Pending& pending) { return pending->done && !pending->failure; });
}

std::vector<base::Rank> OutstandingCalls::awaited() {
  std::set<base::Rank> owners;
  std::lock_guard guard(mutex_);
  for (const auto& [id, pending] : pending_) owners.insert(pending->call->owner);
  return {owners.begin(), owners.end()};
}

std::string OutstandingCalls::asked_of(base::Rank rank) {
  std::lock_guard guard(mutex_);
  std::string first, microbatches;
  int more = -1;
  std::optional<base::Microbatch> latest;
  for (const auto& [id, pending] : pending_) {
    if (pending->call->owner != rank) continue;
    if (++more == 0) first = pending->call->what();
    if (latest != id.microbatch) microbatches += base::str(latest ? ", " : "", id.microbatch);
    latest = id.microbatch;
  }
  if (more > 0) first += base::str(" and ", more, " more of its calls (microbatches ", microbatches, ")");
  return more < 0 ? "" : base::str("while this rank waited for ", first);
}

void OutstandingCalls::ask_for(base::Microbatch microbatch, const Tensors& leaves) {
  std::lock_guard guard(mutex_);
  asked_[microbatch] = leaves;
}

Tensors OutstandingCalls::asked(base::Microbatch microbatch) {
  std::lock_guard guard(mutex_);
  const auto found = asked_.find(microbatch);
  return found == asked_.end() ? Tensors() : found->second;
}

void OutstandingCalls::cancel() {
  std::lock_guard guard(mutex_);
  cancelled_ = true;
  for (auto& [id, pending] : pending_) pending->changed.notify_all();
}

void OutstandingCalls::close() {
  decltype(pending_) pending;  // destroyed outside the lock
  decltype(asked_) asked;
  std::lock_guard guard(mutex_);
  pending.swap(pending_);
  asked.swap(asked_);
}

}  // namespace lamina::remote
