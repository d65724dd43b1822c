// SPDX-License-Identifier: Apache-2.0
#include "lamina/launch/rank_log.h"

#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include "lamina/base/error.h"

namespace lamina::launch {
namespace {

void write_text(const RankLog& log, const std::string& text) {
  ASSERT_EQ(::write(log.fd(), text.data(), text.size()), static_cast<ssize_t>(text.size()));
}

TEST(RankLog, TailIsTheLastLines) {
  RankLog log;
  write_text(log, "one\ntwo\n\nfour\n");
  EXPECT_EQ(log.tail(2), "\nfour\n");
  EXPECT_EQ(log.tail(3), "two\n\nfour\n");
  EXPECT_EQ(log.tail(4), "one\ntwo\n\nfour\n");
  EXPECT_EQ(log.tail(50), "one\ntwo\n\nfour\n");
}

TEST(RankLog, TailEndsAnUnfinishedLine) {
  RankLog log;
  write_text(log, "one\ntw");
  EXPECT_EQ(log.tail(1), "tw\n");
}

TEST(RankLog, TailOfNothingIsNothing) { EXPECT_EQ(RankLog().tail(50), ""); }

TEST(RankLog, TailIsBounded) {
  RankLog log;
  write_text(log, std::string(1000000, 'x') + "\nlast\n");
  const std::string tail = log.tail(2);
  EXPECT_EQ(tail.size(), std::size_t{65536});
  EXPECT_TRUE(tail.ends_with("x\nlast\n"));
}

TEST(RankLog, ItsFileHasNoName) {
  RankLog log;
  struct stat state{};
  ASSERT_EQ(::fstat(log.fd(), &state), 0);
  EXPECT_EQ(state.st_nlink, 0u);
}

TEST(RankLog, AFolderThatCannotBeWrittenIsNamed) {
  const std::string before = ::getenv("TMPDIR") ? ::getenv("TMPDIR") : "";
  ::setenv("TMPDIR", "/no/such/folder", 1);
  EXPECT_THROW(RankLog(), base::ConfigError);
  before.empty() ? ::unsetenv("TMPDIR") : ::setenv("TMPDIR", before.c_str(), 1);
}

}  // namespace
}  // namespace lamina::launch
