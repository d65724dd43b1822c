// SPDX-License-Identifier: Apache-2.0
#include "lamina/observe/recorder.h"

#include <gtest/gtest.h>

#include <thread>
#include <vector>

namespace lamina::observe {
namespace {

Timeline mine() { return {"simple", 3, {{.rank = 2, .leader = 1}}}; }

TEST(Recorder, RecordsOnlyWhileItIsOn) {
  record({.step = 1});
  start_recording(mine());
  record({.step = 2});
  const auto recorded = stop_recording().ranks.at(0);
  record({.step = 3});
  EXPECT_EQ(recorded.rank, 2);
  ASSERT_EQ(recorded.events.size(), 1);
  EXPECT_EQ(recorded.events[0].step, 2);
  start_recording(mine());
  EXPECT_TRUE(stop_recording().ranks.at(0).events.empty());
}

TEST(Recorder, ThreadsRecordAtOnce) {
  start_recording(mine());
  {
    std::vector<std::jthread> threads;
    for (int thread = 0; thread < 4; ++thread) {
      threads.emplace_back([thread] {
        for (int i = 0; i < 1000; ++i) record({.step = thread, .microbatch = i});
      });
    }
  }
  std::vector<std::int64_t> next(4);
  const auto recorded = stop_recording();
  for (const auto& event : recorded.ranks.at(0).events) EXPECT_EQ(event.microbatch, next.at(event.step)++);
  EXPECT_EQ(next, std::vector<std::int64_t>(4, 1000));
}

TEST(Recorder, WhatDoesNotFitIsCounted) {
  start_recording(mine());
  for (std::size_t i = 0; i < kMostEvents + 7; ++i) record({.step = 1});
  const const auto recorded = stop_recording().ranks.at(0);
  EXPECT_EQ(recorded.events.size(), kMostEvents);
  EXPECT_EQ(recorded.dropped, 7);
}

TEST(Recorder, MemoryIsWhatThisProcessHolds) {
  start_recording(mine());
  record_memory();
  const std::vector<char> much(64 << 20, 1);
  record_memory();
  const const auto recorded = stop_recording().ranks.at(0);
  ASSERT_EQ(recorded.events.size(), 2);
  EXPECT_EQ(recorded.events[0].what, What::kMemory);
  EXPECT_GE(recorded.events[1].bytes, recorded.events[0].bytes + (60 << 20));
}

}  // namespace
}  // namespace lamina::observe
