// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace lamina::runtime {

// Threads that run one task each and are kept for the next: last in, first out, so that few of them stay warm. Grows
// without bound, since tasks wait for tasks: a bounded pool would deadlock on nested calls.
class WorkerPool {
 public:
  // Knowledge that a face has of threads.
  struct Hooks {
    std::function<void()> thread_begins;  // called on each thread when it begins, and when it ends
    std::function<void()> thread_ends;
    // Runs a wait in a thread that may hold a lock of the face (Python's GIL), which must not be held meanwhile.
    std::function<void(const std::function<void()>& wait)> blocking;
    std::function<bool()> holds_interpreter_lock;  // see ComputeSlot
    // Called in the thread that enters a step. What it returns runs work in a copy of the face's context of that
    // thread.
    using RunInContext = std::function<void(const std::function<void()>& work)>;
    std::function<RunInContext()> capture_context;
  };

  explicit WorkerPool(Hooks hooks) : hooks_(std::move(hooks)) {}
  // Waits for the running tasks; they were told to end by whoever gave them.
  ~WorkerPool();

  const Hooks& hooks() const { return hooks_; }

  // Runs `task`, which must not throw, on a thread of its own. Throws std::system_error when there is none to have.
  void run(std::function<void()> task);

 private:
  struct Worker {
    std::function<void()> task;
    bool stopping = false;
    std::condition_variable wake;
    std::thread thread;
  };

  void serve(Worker& self);

  const Hooks hooks_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<Worker>> workers_;
  std::vector<Worker*> idle_;
  bool stopping_ = false;
};

}  // namespace lamina::runtime
