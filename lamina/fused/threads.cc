// SPDX-License-Identifier: Apache-2.0
// Threads: callers of `run`, and helpers. A job lives on its caller's stack: the caller takes it out of jobs_, so that
// no helper enters any more, and waits for those within, which compute and wait for nobody.
//
// Locks: mutex_, under which nothing else is taken; pieces are worked on without it.
#include "lamina/fused/threads.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

namespace lamina::fused {

struct Threads::Job {
  const std::function<void(std::size_t)>& work;
  const std::size_t pieces;
  std::atomic<std::size_t> next = 0;
  int helping = 0;  // threads that are in it, besides the caller's

  void take_pieces() {
    for (std::size_t i = next++; i < pieces; i = next++) work(i);
  }
};

class Threads::Team {
 public:
  explicit Team(int helpers) {
    for (int i = 0; i < helpers; ++i) helpers_.emplace_back([this] { help(); });
  }

  ~Team() {
    {
      const std::lock_guard guard(mutex_);
      stopping_ = true;
    }
    has_job_.notify_all();
    for (auto& helper : helpers_) helper.join();
  }

  void run(Job& job) {
    {
      const std::lock_guard guard(mutex_);
      jobs_.push_back(&job);
    }
    const std::size_t wanted = std::min(job.pieces - 1, helpers_.size());
    for (std::size_t i = 0; i < wanted; ++i) has_job_.notify_one();
    job.take_pieces();
    std::unique_lock lock(mutex_);
    std::erase(jobs_, &job);
    left_.wait(lock, [&] { return job.helping == 0; });
  }

 private:
  void help() {
    std::unique_lock lock(mutex_);
    for (;;) {
      // An idle thread waits for work, not for another rank: this wait has no deadline.
      has_job_.wait(lock, [&] { return stopping_ || !jobs_.empty(); });
      if (stopping_) return;
      Job& job = *jobs_.front();
      ++job.helping;
      lock.unlock();
      job.take_pieces();
      lock.lock();
      std::erase(jobs_, &job);  // nothing of it is left to begin
      if (--job.helping == 0) left_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable has_job_, left_;
  std::deque<Job*> jobs_;  // that may have pieces left
  bool stopping_ = false;
  std::vector<std::thread> helpers_;
};

Threads::Threads(int count) : count_(std::max(count, 1)) {
  if (count > 1) team_ = std::make_unique<Team>(count - 1);
}

Threads::~Threads() {
  if (!process_.forked()) return;
  [[maybe_unused]] const auto* kept = team_.release();  // nobody is there who would end
}

void Threads::run(std::size_t pieces, const std::function<void(std::size_t)>& work) {
  if (pieces < 2 || !team_ || process_.forked()) {
    for (std::size_t i = 0; i < pieces; ++i) work(i);
  } else {
    Job job{work, pieces};
    team_->run(job);
  }
}

}  // namespace lamina::fused
