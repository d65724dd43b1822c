// SPDX-License-Identifier: Apache-2.0
#include "lamina/launch/ranks/rank_end.h"

#include <string.h>

#include <algorithm>

#include "lamina/base/str.h"

namespace lamina::launch {
namespace {

using Left = RankEnd::Left;

bool killed(const RankEnd& end) { return end.signal != 0 && end.signal != SIGABRT && end.signal != SIGPIPE; }

bool goes_before(const RankEnd& later, const RankEnd& earlier) {
  if (killed(earlier)) return false;
  if (earlier.left != Left::kInOrder) return killed(later);
  return killed(later) || (earlier.consequence && !later.consequence);
}

}  // namespace

std::string signal_name(int signal) {
  const char* name = ::sigabbrev_np(signal);
  return name ? base::str("SIG", name) : base::str("signal ", signal);
}

std::string RankEnd::words() const {
  if (left == Left::kInStep) return base::str("exit code ", code, " in the middle of step ", step);
  if (signal == 0) return base::str("exit code ", code);
  return base::str("killed by signal ", signal, " (", signal_name(signal), ")",
                   out_of_memory ? " while the kernel's OOM killer was at work: memory ran out" : "");
}

int RankEnd::exit_code() const {
  if (signal != 0) return 128 + signal;
  return left == Left::kInStep ? 1 : code;
}

RankEnd RankEnd::from(const siginfo_t& info) {
  if (info.si_code == CLD_EXITED) return {.code = info.si_status};
  return {.signal = info.si_status};
}

void RootCause::add(base::Rank rank, RankEnd end) {
  if (closed_) {
    ++others_;
  } else if (!end.failed()) {
    succeeded_.push_back({rank, end});
  } else if (!first_) {
    first_ = Failure{rank, end};
  } else {
    ++others_;
    if (goes_before(end, first_->end)) first_ = Failure{rank, end};
  }
  if (!closed_) blame_who_left();
}

void RootCause::blame_who_left() {
  const auto left = std::ranges::find(succeeded_, Left::kInStep, [](const Failure& one) { return one.end.left; });
  if (!first_ || left == succeeded_.end() || killed(first_->end)) return;
  first_ = *left;
  succeeded_.erase(left);
  ++others_;
}

std::vector<base::Rank> RootCause::left() const {
  std::vector<base::Rank> ranks;
  if (!first_ || first_->end.left != Left::kInOrder) return ranks;
  for (const auto& [rank, end] : succeeded_) {
    if (first_->end.consequence || end.left != Left::kInOrder) ranks.push_back(rank);
  }
  return ranks;
}

bool RootCause::certain() const { return first_ && (closed_ || killed(first_->end)); }

}  // namespace lamina::launch
