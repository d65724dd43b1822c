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

// 0 -> 1 -> 0: what the first rank does at the two ends of a microbatch is not the same.
TEST(Planned, EachVisitOfARankTakesWhatItTook) {
  Timeline timeline{"simple", 1, {{.rank = 0}, {.rank = 1}}};
  timeline.ranks[0].events = {span(What::kStep, 0, 80, 0, -1, ""), span(What::kForward, 0, 10, 0, 0, ""),
                              span(What::kForward, 20, 21, 0, 0, ""), span(What::kBackward, 21, 23, 0, 0, ""),
                              span(What::kBackward, 50, 70, 0, 0, "")};
  timeline.ranks[1].events = {span(What::kStep, 0, 80, 0, -1, ""), span(What::kForward, 12, 19, 0, 0, "tail"),
                              span(What::kBackward, 30, 44, 0, 0, "tail")};
  std::vector<Turn> turns;
  for (const auto& [rank, event] : planned_events(timeline)) {
    turns.emplace_back(rank, event.what, event.begin_ns / kMs, event.end_ns / kMs);
  }
  std::ranges::sort(turns, {}, [](const Turn& turn) { return std::get<2>(turn); });
  EXPECT_EQ(turns, (std::vector<Turn>{{0, What::kForward, 0, 10},
                                      {1, What::kForward, 10, 17},
                                      {0, What::kForward, 17, 18},
                                      {0, What::kBackward, 18, 20},
                                      {1, What::kBackward, 20, 34},
                                      {0, What::kBackward, 34, 54}}));
}

// The weight parts come when all else is done: that of the first rank is its whole backward.
TEST(Planned, OfAStepWithSplitBackwardsHasTheirWeightParts) {
  Timeline timeline{"zero_bubble", 5, {{.rank = 0}, {.rank = 1}}};
  timeline.ranks[0].events = {span(What::kStep, 0, 80, 0, -1, ""), span(What::kForward, 0, 10, 0, 0, ""),
                              span(What::kWeights, 50, 70, 0, 0, "")};
  timeline.ranks[1].events = {span(What::kStep, 0, 80, 0, -1, ""), span(What::kForward, 12, 20, 0, 0, "tail"),
                              span(What::kBackward, 20, 30, 0, 0, "tail"), span(What::kWeights, 40, 46, 0, 0, "tail")};
  std::vector<Turn> turns;
  for (const auto& [rank, event] : planned_events(timeline)) {
    turns.emplace_back(rank, event.what, event.begin_ns / kMs, event.end_ns / kMs);
  }
  std::ranges::sort(turns);
  EXPECT_EQ(turns, (std::vector<Turn>{{0, What::kForward, 0, 10},
                                      {0, What::kWeights, 28, 48},
                                      {1, What::kForward, 10, 18},
                                      {1, What::kBackward, 18, 28},
                                      {1, What::kWeights, 28, 34}}));
}

TEST(Planned, NothingIsPlannedForAStepWhoseBeginningWasDropped) {
  for (const What lost : {What::kStep, What::kForward}) {
    Timeline timeline = two_ranks();
    std::erase_if(timeline.ranks[0].events, [&](const Event& event) { return event.what == lost && event.step == 1; });
    EXPECT_FALSE(planned_events(timeline).empty());
    for (const auto& [rank, event] : planned_events(timeline)) EXPECT_NE(event.step, 1) << static_cast<int>(lost);
  }
}

TEST(Planned, NothingIsPlannedForAStepOfOneRank) {
  Timeline timeline = two_ranks();
  timeline.ranks.pop_back();
  EXPECT_TRUE(planned_events(timeline).empty());
}

}  // namespace
}  // namespace lamina::observe
