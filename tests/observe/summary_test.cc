// SPDX-License-Identifier: Apache-2.0
#include "lamina/observe/summary.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/observe/timelines.h"

namespace lamina::observe {
namespace {

using testing::HasSubstr;

TEST(Summary, TheFirstStepDoesNotCount) {
  Timeline timeline = two_ranks();
  timeline.ranks[0].events[0].end_ns += 1000 * kMs;  // of step 0
  const auto summary = summarise(timeline);
  EXPECT_EQ(summary.steps, 2);
  EXPECT_EQ(summary.step_ns, 65 * kMs);
  EXPECT_EQ(summary.planned_ns, 60 * kMs);
}

TEST(Summary, ALonelyStepCounts) {
  Timeline timeline{"simple", 2, {{.rank = 0}, {.rank = 1, .ahead_ns = 500 * kMs}}};
  add_step(timeline, 4, 100);
  EXPECT_EQ(summarise(timeline).steps, 1);
}

TEST(Summary, IdleTimeHasItsReasons) {
  const auto summary = summarise(two_ranks());
  const auto& leading = summary.ranks.at(0);
  EXPECT_EQ(leading.step_ns, 130 * kMs);
  EXPECT_EQ(leading.compute_ns, 60 * kMs);
  EXPECT_EQ(leading.idle_ns,
            (std::map<std::string, std::int64_t>{{"waiting for rank 1", 64 * kMs}, {"end of the step", 6 * kMs}}));
  EXPECT_EQ(summary.ranks.at(1).idle_ns,
            (std::map<std::string, std::int64_t>{{"waiting for rank 0", 22 * kMs}, {"end of the step", 48 * kMs}}));
  EXPECT_DOUBLE_EQ(summary.bubble, 70.0 / 130.0);
}

TEST(Summary, WhatARankSendsItselfIsNoReasonToWait) {
  Timeline timeline = two_ranks();
  Event own = span(What::kReceive, 1641, 1642, 1, 0, "values");
  own.peer = 1;
  timeline.ranks[1].events.push_back(own);
  EXPECT_EQ(summarise(timeline).ranks.at(1).idle_ns, summarise(two_ranks()).ranks.at(1).idle_ns);
}

TEST(Summary, TrafficIsWhatWasSent) {
  const auto summary = summarise(two_ranks());
  EXPECT_EQ(summary.ranks.at(0).messages, 2);
  EXPECT_EQ(summary.ranks.at(0).bytes, 2 * 4096);
  EXPECT_EQ(summary.ranks.at(1).bytes, 2 * 1024);
}

TEST(Summary, TheSlowestModuleIsFirst) {
  Timeline timeline = two_ranks();
  timeline.ranks[1].events.push_back(span(What::kForward, 1700, 1790, 2, 0, "heavy"));
  const auto summary = summarise(timeline);
  EXPECT_EQ(summary.modules.at(0).name, "heavy");
  EXPECT_EQ(summary.modules.at(0).forward_ns, 90 * kMs);
  EXPECT_THAT(describe(summary), HasSubstr("1  heavy"));
}

TEST(Summary, TheTextSaysWhatWasMeasured) {
  const auto text = describe(summarise(two_ranks()));
  EXPECT_THAT(text, HasSubstr("timeline of 2 steps: a step took 65.0 ms, planned 60.0 ms"));
  EXPECT_THAT(text, HasSubstr("waiting for rank 1 49.2 %, end of the step 4.6 %"));
}

TEST(Summary, AnEmptyTimelineIsNoError) {
  EXPECT_EQ(summarise(Timeline()).steps, 0);
  EXPECT_THAT(describe(summarise(Timeline())), HasSubstr("0 steps"));
}

}  // namespace
}  // namespace lamina::observe
