// SPDX-License-Identifier: Apache-2.0
#include "lamina/launch/verdict.h"

namespace lamina::launch {
namespace {

bool killed(const RankEnd& end) { return end.signal != 0 && end.signal != SIGABRT && end.signal != SIGPIPE; }

bool goes_before(const RankEnd& later, const RankEnd& earlier) {
  if (killed(earlier)) return false;
  return killed(later) || (earlier.consequence && !later.consequence);
}

}  // namespace

void Verdict::add(base::Rank rank, RankEnd end) {
  if (closed_) {
    ++others_;
  } else if (!end.failed()) {
    succeeded_.push_back(rank);
  } else if (!first_) {
    first_ = Failure{rank, end};
  } else {
    ++others_;
    if (goes_before(end, first_->end)) first_ = Failure{rank, end};
  }
}

std::vector<base::Rank> Verdict::left() const {
  return first_ && first_->end.consequence ? succeeded_ : std::vector<base::Rank>();
}

bool Verdict::certain() const { return first_ && (closed_ || killed(first_->end)); }

}  // namespace lamina::launch
