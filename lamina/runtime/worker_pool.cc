// SPDX-License-Identifier: Apache-2.0
// States of a worker, under mutex_: it runs a task, or is idle and waits for the next one or for the end.
//
// Threads: whoever has a task gives it; the destructor joins all. A task may wait for another task, so none is ever
// queued: where nobody is idle there is a new worker.
//
// Locks: mutex_, under which nothing else is taken; tasks run, and end, without it. See docs/thread-model.md.
#include "lamina/runtime/worker_pool.h"

#include <c10/core/StreamGuard.h>

#include <utility>

#include "lamina/device/streams.h"

namespace lamina::runtime {

WorkerPool::~WorkerPool() {
  {
    std::lock_guard guard(mutex_);
    stopping_ = true;
    for (Worker* worker : idle_) worker->wake.notify_one();
  }
  for (auto& worker : workers_) worker->thread.join();
}

void WorkerPool::run(std::function<void()> task) {
  std::unique_lock lock(mutex_);
  if (idle_.empty()) {
    Worker& worker = *workers_.emplace_back(std::make_unique<Worker>());
    worker.task = std::move(task);
    try {
      worker.thread = std::thread([this, &worker] { serve(worker); });
    } catch (...) {
      workers_.pop_back();
      throw;
    }
    return;
  }
  Worker* worker = idle_.back();
  idle_.pop_back();
  worker->task = std::move(task);
  lock.unlock();  // which the woken thread takes
  worker->wake.notify_one();
}

void WorkerPool::serve(Worker& self) {
  const c10::OptionalStreamGuard on_stream(devices::default_stream());  // until its work says another
  if (hooks_.thread_begins) hooks_.thread_begins();
  std::unique_lock lock(mutex_);
  while (self.task) {
    auto task = std::exchange(self.task, nullptr);
    lock.unlock();
    task();
    task = nullptr;  // what it holds is destroyed outside the lock
    lock.lock();
    idle_.push_back(&self);
    // An idle thread waits for work, not for another rank: this wait alone has no deadline.
    while (!self.task && !stopping_) self.wake.wait(lock);
  }
  lock.unlock();
  if (hooks_.thread_ends) hooks_.thread_ends();
}

}  // namespace lamina::runtime
