// SPDX-License-Identifier: Apache-2.0
// States of a name, under mutex_:
//
//   unknown --arrive()--> arrived --wait(), poll(), expect()--> taken
//      `--expect(): a reader, wait(): a waiter--> wanted --arrive()--> taken
//
// close() forgets them in any state; cancel() wakes the waiters.
//
// Threads: arrive() runs in the transport's, or in a worker that delivers to its own rank; expect() in the
// transport's; wait() and poll() in a context's.
//
// Locks: mutex_; under it only the compute slot's, as what arrives takes the place of the thread that waits for it.
// Readers are called without it. See docs/thread-model.md.
#include "lamina/remote/deliveries.h"

namespace lamina::remote {

at::Tensor tensor_of(const Arrival& arrival) {
  if (const auto* failure = std::get_if<value::Failure>(&arrival)) throw value::RemoteFailure(*failure);
  return std::get<at::Tensor>(arrival);
}

void Deliveries::expect(const base::CallId& name, Reader reader) {
  std::unique_lock lock(mutex_);
  auto arrival = extract(name);
  if (!arrival) {
    readers_[name] = std::move(reader);
    return;
  }
  lock.unlock();
  reader(std::move(*arrival));
}

Arrival Deliveries::wait(const base::CallId& name, const base::Patience& patience,
                         const std::function<std::string()>& what, std::function<void()> arrives) {
  std::unique_lock lock(mutex_);
  const auto self = std::make_shared<Waiter>();
  self->arrival = extract(name);
  self->arrives = std::move(arrives);
  waiters_[name] = self;
  try {
    base::wait_until(lock, self->arrived, patience, [&] { return self->arrival || cancelled_; }, what);
  } catch (...) {
    if (!lock.owns_lock()) lock.lock();
    waiters_.erase(name);
    throw;
  }
  waiters_.erase(name);
  if (!self->arrival) throw base::CancelledError("the step was ended by an error elsewhere");
  return std::move(*self->arrival);
}

std::optional<Arrival> Deliveries::poll(const base::CallId& name) {
  std::lock_guard guard(mutex_);
  return extract(name);
}

std::optional<Arrival> Deliveries::extract(const base::CallId& name) {
  const auto found = arrived_.find(name);
  if (found == arrived_.end()) return std::nullopt;
  std::optional<Arrival> arrival = std::move(found->second);
  arrived_.erase(found);
  return arrival;
}

void Deliveries::arrive(const base::CallId& name, Arrival arrival) {
  std::unique_lock lock(mutex_);
  if (const auto found = waiters_.find(name); found != waiters_.end()) {
    const auto waiter = found->second;
    waiter->arrival = std::move(arrival);
    if (waiter->arrives) waiter->arrives();
    lock.unlock();  // which the woken thread takes
    return waiter->arrived.notify_one();
  }
  const auto found = readers_.find(name);
  if (found == readers_.end()) {
    arrived_.emplace(name, std::move(arrival));
    return;
  }
  const auto reader = std::move(found->second);
  readers_.erase(found);
  lock.unlock();
  reader(std::move(arrival));
}

void Deliveries::arrive(Values values) {
  auto* tensors = std::get_if<Tensors>(&values.values);
  for (std::size_t i = 0; i < values.names.size(); ++i) {
    if (tensors != nullptr) {
      arrive(values.names[i], std::move(tensors->at(i)));
    } else {
      arrive(values.names[i], std::get<value::Failure>(values.values));
    }
  }
}

void Deliveries::cancel() {
  std::lock_guard guard(mutex_);
  cancelled_ = true;
  for (auto& [name, waiter] : waiters_) waiter->arrived.notify_one();
}

void Deliveries::close() {
  decltype(arrived_) arrived;  // destroyed outside the lock
  decltype(readers_) readers;
  std::lock_guard guard(mutex_);
  arrived.swap(arrived_);
  readers.swap(readers_);
}

}  // namespace lamina::remote
