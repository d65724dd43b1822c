// SPDX-License-Identifier: Apache-2.0
#include "lamina/launch/ranks/rank_log.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/resource.h>

#include <filesystem>
#include <fstream>
#include <iterator>

#include "lamina/base/error.h"

namespace lamina::launch {
namespace {

constexpr std::int64_t kLimit = 1 << 20;

TEST(RankLog, TailIsTheLastLines) {
  RankLog log(kLimit);
  log.write("one\ntwo\n\nfour\n");
  EXPECT_EQ(log.tail(2), "\nfour\n");
  EXPECT_EQ(log.tail(3), "two\n\nfour\n");
  EXPECT_EQ(log.tail(4), "one\ntwo\n\nfour\n");
  EXPECT_EQ(log.tail(50), "one\ntwo\n\nfour\n");
}

TEST(RankLog, TailEndsAnUnfinishedLine) {
  RankLog log(kLimit);
  log.write("one\ntw");
  EXPECT_EQ(log.tail(1), "tw\n");
}

TEST(RankLog, TailOfNothingIsNothing) { EXPECT_EQ(RankLog(kLimit).tail(50), ""); }

TEST(RankLog, TailIsBounded) {
  RankLog log(kLimit);
  log.write(std::string(1000000, 'x') + "\nlast\n");
  const std::string tail = log.tail(2);
  EXPECT_EQ(tail.size(), std::size_t{65536});
  EXPECT_TRUE(tail.ends_with("x\nlast\n"));
}

TEST(RankLog, TailIsOfWhatCameSinceTheBeginning) {
  RankLog log(kLimit);
  log.write("one\n");
  log.begin_here();
  EXPECT_EQ(log.tail(50), "");
  log.write("two\n");
  EXPECT_EQ(log.tail(50), "two\n");
}

// Where logs without names have their files, and names are given to them.
class Kept : public testing::Test {
 protected:
  Kept() {
    std::string folder = (std::filesystem::temp_directory_path() / "kept-XXXXXX").string();
    folder_ = ::mkdtemp(folder.data());
    ::setenv("TMPDIR", folder_.c_str(), 1);
  }
  ~Kept() override {
    before_.empty() ? ::unsetenv("TMPDIR") : ::setenv("TMPDIR", before_.c_str(), 1);
    std::filesystem::remove_all(folder_);
  }

  std::string kept(const RankLog& log) const {
    EXPECT_EQ(log.keep_as(folder_ + "/kept"), "");
    std::ifstream file(folder_ + "/kept");
    return {std::istreambuf_iterator<char>(file), {}};
  }

  std::string folder_;
  const std::string before_ = ::getenv("TMPDIR") ? ::getenv("TMPDIR") : "";
};

TEST_F(Kept, AFileHasNoNameUntilItGetsOne) {
  RankLog log(kLimit);
  log.write("one\n");
  EXPECT_TRUE(std::filesystem::is_empty(folder_));
  EXPECT_EQ(kept(log), "one\n");
}

TEST_F(Kept, TheLastPartOfWhatIsLongerThanTheLimit) {
  RankLog log(1000);
  std::string all;
  for (int i = 0; i < 777; ++i) {
    const std::string line = "line " + std::to_string(i) + "\n";
    log.write(line);
    all += line;
  }
  EXPECT_EQ(kept(log), "[the first " + std::to_string(all.size() - 1000) + " bytes are not kept]\n" +
                           all.substr(all.size() - 1000));
}

// As a full disk does, a limit on the size of files makes writes fail.
TEST_F(Kept, WhatTheDiskDoesNotTakeIsRememberedAndSaidToBeMissing) {
  ::signal(SIGXFSZ, SIG_IGN);
  rlimit before{};
  ::getrlimit(RLIMIT_FSIZE, &before);
  const rlimit full{.rlim_cur = 4096, .rlim_max = before.rlim_max};
  const std::string start(5000, 'a');
  const std::string middle(300000, 'b');
  const std::string end(200000, 'c');
  RankLog log(kLimit);
  ::setrlimit(RLIMIT_FSIZE, &full);
  log.write(start);
  const std::string soon = log.tail(1);
  log.write(middle);
  log.write(end);
  ::setrlimit(RLIMIT_FSIZE, &before);
  EXPECT_EQ(soon, start + "\n");
  EXPECT_EQ(log.trouble(), "File too large");
  EXPECT_EQ(log.tail(1), std::string(65536, 'c') + "\n");
  const std::string text = kept(log);
  EXPECT_TRUE(text.starts_with(start.substr(0, 4096) + "\n["));
  EXPECT_NE(text.find(" bytes are missing: File too large]\nc"), std::string::npos);
  EXPECT_TRUE(text.ends_with(std::string(65536, 'c')));
}

TEST(RankLog, AFolderThatCannotBeWrittenIsNamed) {
  const std::string before = ::getenv("TMPDIR") ? ::getenv("TMPDIR") : "";
  ::setenv("TMPDIR", "/no/such/folder", 1);
  EXPECT_THROW(RankLog{kLimit}, base::ConfigError);
  before.empty() ? ::unsetenv("TMPDIR") : ::setenv("TMPDIR", before.c_str(), 1);
}

}  // namespace
}  // namespace lamina::launch
