// SPDX-License-Identifier: Apache-2.0
#include "lamina/digests/recording.h"

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <limits>

#include "lamina/base/error.h"

namespace lamina::digests {
namespace {

class Recording : public testing::Test {
 protected:
  Recording() : folder_(std::filesystem::path(testing::TempDir()) / "recording") {
    std::filesystem::remove_all(folder_);
    std::filesystem::create_directories(folder_);
  }
  ~Recording() override { std::filesystem::remove_all(folder_); }

  std::filesystem::path file() const { return folder_ / "rank-2.jsonl"; }
  void append(const std::string& text) const { std::ofstream(file(), std::ios::app) << text; }

  const std::filesystem::path folder_;
  const RankRecording about_{.rank = 2, .world = 4, .copy = 1, .partition = 0, .about = {{"torch", "2.13"}}};
  const Digest digest_{"float32", {2, 3}, 0, 6, 1.5, {0.1, -0.2, 1e300, 4, 5, 6, 7, 8}, 1, 0.7, 2, 0xffffffffffffffff};
  const Seen seen_{RecordedKind::kOutput, 1, 3, "layers.0", 2, 1, 17, digest_};
};

TEST_F(Recording, ReadsWhatWasWritten) {
  {
    Writer writer(folder_.string(), about_);
    writer.write(seen_);
    writer.write(call_of(seen_), Surroundings{"gradients", 42, true});
    writer.end_step(2);
    writer.end();
  }
  const auto ranks = read_run(folder_.string());
  ASSERT_EQ(ranks.size(), 1U);
  const auto& rank = ranks.front();
  EXPECT_EQ(std::tuple(rank.rank, rank.world, rank.copy, rank.partition), std::tuple(2, 4, 1, 0));
  EXPECT_EQ(rank.about.at("torch"), "2.13");
  ASSERT_EQ(rank.seen.size(), 1U);
  EXPECT_EQ(rank.seen.front().digest, digest_);
  EXPECT_EQ(call_of(rank.seen.front()), call_of(seen_));
  EXPECT_EQ(rank.seen.front().order, 17);
  EXPECT_EQ(rank.calls.at(call_of(seen_)).generator, 42U);
  EXPECT_EQ(rank.steps, 2);
  EXPECT_TRUE(rank.ended);
}

TEST_F(Recording, GoesOnWhereAnEarlierJobOfTheProcessHasEnded) {
  for (const int before : {0, 2}) {
    Writer writer(folder_.string(), about_);
    EXPECT_EQ(writer.steps_before(), before);
    writer.write(seen_);
    writer.end_step(before + 2);
    writer.end();
  }
  const auto ranks = read_run(folder_.string());
  EXPECT_EQ(std::tuple(ranks.at(0).seen.size(), ranks.at(0).steps), std::tuple(2U, 4));
}

TEST_F(Recording, KeepsTheLinesBeforeTheOneThatAKilledRankWasWriting) {
  {
    Writer writer(folder_.string(), about_);
    writer.write(seen_);
    writer.end_step(1);
  }
  append("{\"kind\": \"outp");
  const auto rank = read_run(folder_.string()).front();
  EXPECT_EQ(rank.seen.size(), 1U);
  EXPECT_EQ(rank.steps, 1);
  EXPECT_FALSE(rank.ended);
}

TEST_F(Recording, KeepsWhatIsNoNumber) {
  Digest wide = digest_;
  wide.squares = std::numeric_limits<double>::infinity();
  Seen seen = seen_;
  seen.digest = wide;
  {
    Writer(folder_.string(), about_).write(seen);
  }
  EXPECT_EQ(read_run(folder_.string()).front().seen.front().digest, wide);
}

TEST_F(Recording, RefusesOtherFiles) {
  EXPECT_THROW(read_run((folder_ / "none").string()), base::Error);
  EXPECT_THROW(read_run(folder_.string()), base::Error);  // nothing in it
  append("{\"lamina recording\": 99}\n");
  EXPECT_THROW(read_run(folder_.string()), base::FormatError);
  std::filesystem::remove(file());
  append("[1, 2\n");
  EXPECT_THROW(read_run(folder_.string()), base::FormatError);
  std::filesystem::remove(file());
  append("");
  EXPECT_THROW(read_run(folder_.string()), base::FormatError);
}

TEST_F(Recording, IsNotWrittenThroughALink) {
  const auto precious = folder_ / "precious";
  std::ofstream(precious) << "precious";
  std::filesystem::create_symlink("precious", file());
  EXPECT_THROW(Writer(folder_.string(), about_), base::FileError);
  std::filesystem::remove(file());
  EXPECT_EQ(std::filesystem::file_size(precious), 8U);
}

TEST_F(Recording, TellsOfAFullDiskWhereTheStepEnds) {
  std::filesystem::remove(file());
  struct rlimit before{};
  ::getrlimit(RLIMIT_FSIZE, &before);
  auto* const handler = std::signal(SIGXFSZ, SIG_IGN);
  Writer writer(folder_.string(), about_);
  const rlimit full{.rlim_cur = std::filesystem::file_size(file()) + 100, .rlim_max = before.rlim_max};
  ::setrlimit(RLIMIT_FSIZE, &full);
  for (int i = 0; i < 1000; ++i) writer.write(seen_);
  EXPECT_THROW(writer.end_step(1), base::FileError);
  EXPECT_THROW(writer.end(), base::FileError);
  ::setrlimit(RLIMIT_FSIZE, &before);
  std::signal(SIGXFSZ, handler);
  EXPECT_FALSE(read_run(folder_.string()).front().ended);
}

}  // namespace
}  // namespace lamina::digests
