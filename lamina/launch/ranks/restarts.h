// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <optional>

#include "lamina/launch/ranks/supervisor.h"

namespace lamina::launch {

// When a job that failed is started again: at most `most` times, after a pause that doubles from start to start, and
// not if it has failed in the same way twice in a row within kQuick of its start: then another start would not help.
class Restarts {
 public:
  using Span = std::chrono::steady_clock::duration;
  static constexpr std::chrono::seconds kQuick{10};

  explicit Restarts(int most) : most_(most) {}

  int count() const { return count_; }
  int most() const { return most_; }

  enum class Next { kOver, kHopeless, kAgain };
  Next judge(const Outcome& outcome, Span lasted);  // kAgain counts
  std::chrono::milliseconds pause() const;          // before the start that was judged last

 private:
  const int most_;
  int count_ = 0;
  std::optional<Outcome> quick_;  // how the last start ended, if soon
};

}  // namespace lamina::launch
