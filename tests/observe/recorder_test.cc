// SPDX-License-Identifier: Apache-2.0
#include "lamina/observe/recorder.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include "lamina/observe/timeline_part.h"
#include "tests/observe/temp_folder.h"

namespace lamina::observe {
namespace {

Timeline mine() { return {"simple", 3, {{.rank = 2, .leader = 1}}}; }

TEST(Recorder, RecordsOnlyWhileItIsOn) {
  Recorder recorder;
  EXPECT_FALSE(recorder.on());
  recorder.record({.step = 1});
  recorder.start(mine());
  EXPECT_TRUE(recorder.on());
  recorder.record({.step = 2});
  const auto recorded = recorder.stop().ranks.at(0);
  recorder.record({.step = 3});
  EXPECT_EQ(recorded.rank, 2);
  ASSERT_EQ(recorded.events.size(), 1);
  EXPECT_EQ(recorded.events[0].step, 2);
  recorder.start(mine());
  EXPECT_TRUE(recorder.stop().ranks.at(0).events.empty());
}

TEST(Recorder, ThreadsRecordAtOnce) {
  Recorder recorder;
  recorder.start(mine());
  {
    std::vector<std::jthread> threads;
    for (int thread = 0; thread < 4; ++thread) {
      threads.emplace_back([&recorder, thread] {
        for (int i = 0; i < 1000; ++i) recorder.record({.step = thread, .microbatch = i});
      });
    }
  }
  std::vector<std::int64_t> next(4);
  const auto recorded = recorder.stop();
  for (const auto& event : recorded.ranks.at(0).events) EXPECT_EQ(event.microbatch, next.at(event.step)++);
  EXPECT_EQ(next, std::vector<std::int64_t>(4, 1000));
}

TEST(Recorder, WhatDoesNotFitIsCounted) {
  Recorder recorder;
  recorder.start(mine());
  for (std::size_t i = 0; i < kMostEvents + 7; ++i) recorder.record({.step = 1});
  const auto recorded = recorder.stop().ranks.at(0);
  EXPECT_EQ(recorded.events.size(), kMostEvents);
  EXPECT_EQ(recorded.dropped, 7);
}

TEST(Recorder, MemoryIsWhatThisProcessHolds) {
  Recorder recorder;
  recorder.start(mine());
  recorder.record_memory();
  const std::vector<char> much(64 << 20, 1);
  recorder.record_memory();
  const auto recorded = recorder.stop().ranks.at(0);
  ASSERT_EQ(recorded.events.size(), 2);
  EXPECT_EQ(recorded.events[0].what, What::kMemory);
  EXPECT_GE(recorded.events[1].bytes, recorded.events[0].bytes + (60 << 20));
}

TEST(Recorder, TotalsAreOfWhatCameSinceTheLastTime) {
  Recorder recorder;
  recorder.start_counting();
  recorder.record({.what = What::kForward, .begin_ns = 10, .end_ns = 30});
  recorder.record({.what = What::kBackward, .begin_ns = 40, .end_ns = 45});
  recorder.record({.what = What::kSend, .begin_ns = 50, .end_ns = 51, .bytes = 64});
  recorder.record({.what = What::kReceive, .begin_ns = 50, .end_ns = 51, .bytes = 32});
  recorder.record({.what = What::kStep, .begin_ns = 0, .end_ns = 100});
  const auto first = recorder.take_totals();
  EXPECT_EQ(first.compute_ns, 25);
  EXPECT_EQ(first.step_ns, 100);
  EXPECT_EQ(first.messages, 1);
  EXPECT_EQ(first.bytes, 64);
  recorder.record({.what = What::kMemory, .bytes = 7});
  const auto second = recorder.take_totals();
  EXPECT_EQ(second.compute_ns + second.step_ns + second.bytes, 0);
  EXPECT_EQ(second.peak_bytes, 7);
  EXPECT_TRUE(recorder.stop().ranks.at(0).events.empty());
}

TEST(Recorder, APartHasAllThatWasRecordedBeforeItWasSaved) {
  const TempFolder folder;
  const auto path = folder / "part";
  Recorder recorder;
  recorder.start_part(path, mine());
  recorder.save();
  EXPECT_FALSE(std::filesystem::exists(path));
  for (std::int64_t step = 0; step < 3; ++step) {
    recorder.record({.what = What::kStep, .begin_ns = step, .end_ns = step + 1, .step = step});
    recorder.save();
    EXPECT_EQ(read_part(path).ranks.at(0).events.size(), step + 1);
  }
  EXPECT_EQ(read_part(path), recorder.stop());
}

TEST(Recorder, SavesAtOnceAndThenOnlySometimes) {
  const TempFolder folder;
  const auto path = folder / "part";
  Recorder recorder;
  recorder.start_part(path, mine());
  const auto begin = now_ns();
  int saves = 0;
  std::uintmax_t size = 0;
  for (std::int64_t step = 0; step < 1000; ++step) {
    recorder.record({.what = What::kStep, .step = step});
    recorder.save_sometimes();
    saves += std::filesystem::file_size(path) != std::exchange(size, std::filesystem::file_size(path));
  }
  EXPECT_LE(saves, 1 + (now_ns() - begin) / 1'000'000'000);
  EXPECT_GE(saves, 1);
}

TEST(Recorder, APartOfAnEarlierSessionIsForgotten) {
  const TempFolder folder;
  for (std::int64_t session = 0; session < 2; ++session) {
    Recorder recorder;
    recorder.start_part(folder / "part", mine());
    recorder.record({.step = session});
    recorder.save();
  }
  const auto events = read_part(folder / "part").ranks.at(0).events;
  ASSERT_EQ(events.size(), 1);
  EXPECT_EQ(events[0].step, 1);
}

TEST(Span, LastsAsLongAsItsObjectAndCostsNothingWhereTheRecorderIsOff) {
  Recorder recorder;
  const auto event = []() -> Event { return {.what = What::kWait, .name = "x"}; };
  const auto never = []() -> Event { throw std::logic_error("asked while it is off"); };
  {
    const Span none(nullptr, never);
  }
  {
    const Span off(&recorder, never);
  }
  recorder.start(mine());
  const auto before = now_ns();
  {
    const Span span(&recorder, event);
  }
  const auto recorded = recorder.stop().ranks.at(0).events;
  ASSERT_EQ(recorded.size(), 1);
  EXPECT_EQ(recorded[0].name, "x");
  EXPECT_LE(before, recorded[0].begin_ns);
  EXPECT_LE(recorded[0].begin_ns, recorded[0].end_ns);
  EXPECT_LE(recorded[0].end_ns, now_ns());
}

}  // namespace
}  // namespace lamina::observe
