// SPDX-License-Identifier: Apache-2.0
#include "lamina/observe/timeline_part.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>

#include <filesystem>
#include <fstream>

#include "lamina/base/error.h"
#include "lamina/observe/recorder.h"
#include "tests/observe/temp_folder.h"
#include "tests/observe/timelines.h"

namespace lamina::observe {
namespace {

void write(const std::string& path, const std::string& text) { std::ofstream(path) << text; }

// Each rank of `timeline` as it leaves its part: a receiver does not know the sender.
void write_parts(const Timeline& timeline, const TempFolder& folder) {
  for (auto record : timeline.ranks) {
    for (auto& event : record.events) {
      if (event.what == What::kReceive) event.peer = -1;
    }
    const auto rank = record.rank;
    append_to_part({timeline.schedule, timeline.active_microbatches, {std::move(record)}}, part_in(folder / "", rank));
  }
}

TEST(TimelineParts, TogetherAreTheTimeline) {
  const TempFolder folder;
  write_parts(two_ranks(), folder);
  EXPECT_EQ(read_parts(folder / ""), two_ranks());
}

TEST(TimelineParts, WhatARankLeftHalfWrittenIsLeftOut) {
  const TempFolder folder;
  auto whole = two_ranks();
  whole.schedule = "simple";
  write_parts(whole, folder);
  const auto second = part_in(folder / "", 1);
  std::filesystem::resize_file(second, std::filesystem::file_size(second) / 2);
  const auto timeline = read_parts(folder / "");
  ASSERT_EQ(timeline.ranks.size(), 1);
  EXPECT_EQ(timeline.ranks[0].rank, 0);
  EXPECT_EQ(timeline.schedule, "simple");
}

TEST(TimelineParts, WhatARankWroteBeforeItWasKilledIsThere) {
  const TempFolder folder;
  const auto path = folder / "part";
  append_to_part({"simple", 2, {{.rank = 3, .events = {{.step = 0}}}}}, path);
  append_to_part({"simple", 2, {{.rank = 3, .dropped = 1, .events = {{.step = 1}}}}}, path);
  const Timeline both = read_part(path);
  EXPECT_EQ(both, (Timeline{"simple", 2, {{.rank = 3, .dropped = 1, .events = {{.step = 0}, {.step = 1}}}}}));
  std::filesystem::resize_file(path, std::filesystem::file_size(path) - 1);
  EXPECT_EQ(read_part(path), (Timeline{"simple", 2, {{.rank = 3, .events = {{.step = 0}}}}}));
}

// A limit on the size of files stands for a full disk.
TEST(TimelineParts, WhatAFullDiskDidNotTakeIsAnErrorAndHarmsNoOtherPiece) {
  const TempFolder folder;
  const auto path = folder / "part";
  const auto piece = [](std::int64_t step) { return Timeline{"simple", 2, {{.rank = 3, .events = {{.step = step}}}}}; };
  append_to_part(piece(0), path);
  ::signal(SIGXFSZ, SIG_IGN);
  rlimit before{};
  ::getrlimit(RLIMIT_FSIZE, &before);
  const rlimit full{.rlim_cur = std::filesystem::file_size(path) + 20, .rlim_max = before.rlim_max};
  ::setrlimit(RLIMIT_FSIZE, &full);
  EXPECT_THROW(append_to_part(piece(1), path), base::Error);
  ::setrlimit(RLIMIT_FSIZE, &before);
  append_to_part(piece(2), path);
  EXPECT_EQ(read_part(path), (Timeline{"simple", 2, {{.rank = 3, .events = {{.step = 0}, {.step = 2}}}}}));
}

TEST(TimelineParts, NoneAreAnEmptyTimeline) {
  const TempFolder folder;
  EXPECT_TRUE(read_parts(folder / "").ranks.empty());
}

TEST(TimelineParts, BytesThatAreWrongAreAnErrorOrAnotherTimelineAndNothingWorse) {
  const std::string right = encode(two_ranks());
  int refused = 0;
  for (std::size_t at = 0; at < right.size(); ++at) {
    for (const char change : {'\x01', '\x80', '\xff'}) {
      std::string wrong = right;
      wrong[at] = static_cast<char>(wrong[at] ^ change);
      try {
        decode(wrong);
      } catch (const base::FormatError&) {
        ++refused;
      }
    }
  }
  EXPECT_GT(refused, 100);
}

TEST(TimelineFile, SaysWhatCannotBeReadOrWritten) {
  const TempFolder folder;
  EXPECT_THROW(read_file(folder / "none"), base::Error);
  EXPECT_THROW(write_file(two_ranks(), folder / "no/such/folder"), base::Error);
  write(folder / "other", "{\"traceEvents\":[]}");
  EXPECT_THROW(read_file(folder / "other"), base::FormatError);
}

}  // namespace
}  // namespace lamina::observe
