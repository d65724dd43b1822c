// SPDX-License-Identifier: Apache-2.0
#include "lamina/launch/ranks/restarts.h"

#include <algorithm>

namespace lamina::launch {
namespace {

constexpr std::chrono::milliseconds kFirstPause{500};
constexpr std::chrono::milliseconds kLongestPause{60000};

}  // namespace

Restarts::Next Restarts::judge(const Outcome& outcome, Span lasted) {
  if (!outcome.again || count_ == most_) return Next::kOver;
  const bool quick = lasted < kQuick;
  if (quick && quick_ && quick_->exit_code == outcome.exit_code && quick_->end == outcome.end) {
    return Next::kHopeless;
  }
  quick_ = quick ? std::optional(outcome) : std::nullopt;
  ++count_;
  return Next::kAgain;
}

std::chrono::milliseconds Restarts::pause() const {
  return std::min(kLongestPause, kFirstPause * (1 << std::clamp(count_ - 1, 0, 10)));
}

}  // namespace lamina::launch
