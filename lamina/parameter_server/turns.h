// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <set>

#include "lamina/base/wait.h"

namespace lamina::parameter_server {

// Calls of a rank's modules run one at a time, in the order in which they came: a process has one random generator.
class Turns {
 public:
  // This thread's turn while it lives. Throws base::TimeoutError.
  class Turn {
   public:
    Turn(Turns& turns, const base::Patience& patience);
    ~Turn();
    Turn(const Turn&) = delete;

   private:
    friend class Turns;
    Turns& turns_;
    const base::Patience patience_;
    Turn* const outer_;
  };

  // While it lives others take their turns: this thread waits for another rank, which may call modules here. When it
  // ends the thread is the first of those that wait.
  class Pause {
   public:
    Pause();
    ~Pause();
    Pause(const Pause&) = delete;

   private:
    Turn* const turn_;
  };

 private:
  void take(std::int64_t ticket, const base::Patience& patience);
  void give();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::int64_t tickets_ = 0;
  std::int64_t returns_ = 0;  // negative tickets: those that come back from a pause go first
  bool taken_ = false;
  std::set<std::int64_t> waiting_;
};

}  // namespace lamina::parameter_server
