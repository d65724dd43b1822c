// SPDX-License-Identifier: Apache-2.0
#include "lamina/plan/even_split.h"

#include <gtest/gtest.h>
#include <rapidcheck.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <numeric>
#include <tuple>

namespace lamina::plan {
namespace {

using Weights = std::vector<std::int64_t>;
using Ends = std::vector<std::size_t>;

EvenSplit measured(const Weights& weights, Ends ends) {
  EvenSplit split;
  std::size_t begin = 0;
  for (std::size_t end : ends) {
    const auto sum = std::accumulate(weights.begin() + static_cast<std::ptrdiff_t>(begin),
                                     weights.begin() + static_cast<std::ptrdiff_t>(end), std::int64_t(0));
    split.largest = std::max(split.largest, sum);
    split.spread += static_cast<double>(sum * sum);
    begin = end;
  }
  split.ends = std::move(ends);
  return split;
}

// Tries every split.
EvenSplit best_by_trial(const Weights& weights, std::size_t segments, const Ends& ends = {}) {
  if (ends.size() + 1 == segments) {
    Ends all = ends;
    all.push_back(weights.size());
    return measured(weights, all);
  }
  EvenSplit best;
  const std::size_t left = segments - ends.size() - 1;
  for (std::size_t end = ends.empty() ? 1 : ends.back() + 1; end + left <= weights.size(); ++end) {
    Ends longer = ends;
    longer.push_back(end);
    EvenSplit split = best_by_trial(weights, segments, longer);
    const auto key = [](const EvenSplit& c) { return std::tie(c.largest, c.spread, c.ends); };
    if (best.ends.empty() || key(split) < key(best)) best = std::move(split);
  }
  return best;
}

RC_GTEST_PROP(CutProperty, IsTheBestOfAll, ()) {
  const auto weights = *rc::gen::resize(9, rc::gen::nonEmpty(rc::gen::container<Weights>(rc::gen::inRange(1, 12))));
  const int segments = *rc::gen::inRange(1, 6);
  const EvenSplit split = split_evenly(weights, segments);
  const EvenSplit best = best_by_trial(weights, std::min(weights.size(), static_cast<std::size_t>(segments)));
  RC_ASSERT(split.largest == best.largest);
  RC_ASSERT(split.spread == best.spread);
  RC_ASSERT(split.ends == best.ends);
}

TEST(EvenSplit, PrefersTheMoreEvenThenTheEarlier) {
  EXPECT_EQ(split_evenly(Weights{9, 1, 1, 1, 1}, 3).ends, (Ends{1, 3, 5}));
  EXPECT_EQ(split_evenly(Weights{1, 1, 1, 1, 1}, 4).ends, (Ends{1, 2, 3, 5}));
}

TEST(EvenSplit, OfNothingHasNoSegments) { EXPECT_TRUE(split_evenly({}, 3).ends.empty()); }

}  // namespace
}  // namespace lamina::plan
