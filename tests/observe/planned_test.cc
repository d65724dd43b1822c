// SPDX-License-Identifier: Apache-2.0
#include "lamina/observe/planned.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <tuple>

#include "tests/observe/timelines.h"

namespace lamina::observe {
namespace {

using Turn = std::tuple<std::int64_t, What, std::int64_t, std::int64_t>;  // rank, what, begin and end in ms

TEST(Planned, AStepWithoutWaitsAndMessages) {
  std::vector<Turn> turns;
  for (const auto& [rank, event] : planned_events(two_ranks())) {
    if (event.step == 1) turns.emplace_back(rank, event.what, event.begin_ns / kMs, event.end_ns / kMs);
  }
  std::ranges::sort(turns);
  EXPECT_EQ(turns, (std::vector<Turn>{{0, What::kForward, 1100, 1110},
                                      {0, What::kBackward, 1140, 1160},
                                      {1, What::kForward, 1110, 1120},
                                      {1, What::kBackward, 1120, 1140}}));
}

TEST(Planned, MicrobatchesOverlapAsTheScheduleLetsThem) {
  Timeline timeline = two_ranks();
  for (auto& record : timeline.ranks) {
    const auto events = record.events;
    for (auto event : events) {  // a second microbatch, as if everything had been one after the other
      if (event.what == What::kStep) continue;
      event.microbatch = 1;
      event.begin_ns += 65 * kMs;
      event.end_ns += 65 * kMs;
      record.events.push_back(event);
    }
  }
  std::int64_t end = 0;
  for (const auto& [rank, event] : planned_events(timeline)) {
    if (event.step == 0) end = std::max(end, event.end_ns / kMs);
  }
  EXPECT_EQ(end, 1000 + (2 + 1) * 30);
}

TEST(Planned, NothingIsPlannedForAStepOfOneRank) {
  Timeline timeline = two_ranks();
  timeline.ranks.pop_back();
  EXPECT_TRUE(planned_events(timeline).empty());
}

}  // namespace
}  // namespace lamina::observe
