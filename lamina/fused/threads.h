// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <functional>
#include <memory>

#include "lamina/base/fork_guard.h"

namespace lamina::fused {

// Threads that help whoever has work in pieces. They are kept, and know neither torch nor OpenMP. A child made by
// fork() has none, and works alone.
class Threads {
 public:
  // `count` with the caller's own: 1 has none besides.
  explicit Threads(int count);
  ~Threads();
  Threads(const Threads&) = delete;
  Threads& operator=(const Threads&) = delete;

  int count() const { return count_; }

  // Calls `work`, which must not throw, with each number below `pieces`, here and in those threads that are free;
  // returns when all are done. From several threads at once, each of which goes on if no helper is free.
  void run(std::size_t pieces, const std::function<void(std::size_t)>& work);

 private:
  struct Job;
  class Team;

  const int count_;
  std::unique_ptr<Team> team_;  // none where there is nobody besides
  base::MadeHere process_;
};

}  // namespace lamina::fused
