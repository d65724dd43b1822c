// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <dlfcn.h>
#include <pthread.h>

#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <mutex>

#include "lamina/base/wait.h"

// Included once in a program: it stands before the C library's function that makes threads, so that a test may say that
// the system has none to give.
inline std::atomic<bool> no_more_threads = false;

extern "C" int pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*run)(void*),
                              void* argument) {
  if (no_more_threads) return EAGAIN;
  static const auto real = reinterpret_cast<decltype(&pthread_create)>(dlsym(RTLD_NEXT, "pthread_create"));
  return real(thread, attributes, run, argument);
}

namespace lamina::runtime {

inline const base::Patience kPatience{std::chrono::seconds(30), [] {}};

// A latch that a test opens.
class Gate {
 public:
  void open() {
    std::lock_guard guard(mutex_);
    open_ = true;
    changed_.notify_all();  // under the lock: whoever waits may destroy this
  }
  void wait() {
    std::unique_lock lock(mutex_);
    base::wait_until(lock, changed_, kPatience, [&] { return open_; }, [] { return "gate"; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool open_ = false;
};

}  // namespace lamina::runtime
