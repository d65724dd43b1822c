// SPDX-License-Identifier: Apache-2.0
#include "lamina/launch/ranks/rank_end.h"

#include <gtest/gtest.h>

namespace lamina::launch {
namespace {

TEST(RankEnd, SaysItsExitCode) {
  const RankEnd end{.code = 3};
  EXPECT_TRUE(end.failed());
  EXPECT_EQ(end.words(), "exit code 3");
  EXPECT_EQ(end.exit_code(), 3);
}

TEST(RankEnd, SaysItsSignalByNumberAndName) {
  const RankEnd end{.signal = SIGKILL};
  EXPECT_TRUE(end.failed());
  EXPECT_EQ(end.words(), "killed by signal 9 (SIGKILL)");
  EXPECT_EQ(end.exit_code(), 137);
}

TEST(RankEnd, ZeroIsSuccess) { EXPECT_FALSE(RankEnd{}.failed()); }

TEST(RankEnd, RealTimeSignalsHaveANumberOnly) { EXPECT_EQ(signal_name(40), "signal 40"); }

}  // namespace
}  // namespace lamina::launch
