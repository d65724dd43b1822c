// SPDX-License-Identifier: Apache-2.0
#include "lamina/launch/ranks/attempt.h"

#include <gtest/gtest.h>

namespace lamina::launch {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using Next = Restarts::Next;

Outcome failed(int code) { return {.exit_code = code, .again = true, .end = RankEnd{.code = code}}; }

TEST(Restarts, AreAsManyAsAsked) {
  Restarts restarts(2);
  EXPECT_EQ(restarts.judge(failed(1), seconds(100)), Next::kAgain);
  EXPECT_EQ(restarts.judge(failed(1), seconds(100)), Next::kAgain);
  EXPECT_EQ(restarts.judge(failed(1), seconds(100)), Next::kOver);
  EXPECT_EQ(restarts.count(), 2);
}

TEST(Restarts, NeitherASuccessNorAnOrderIsAReason) {
  Restarts restarts(2);
  EXPECT_EQ(restarts.judge({}, seconds(100)), Next::kOver);
  EXPECT_EQ(restarts.judge({.exit_code = 130}, seconds(100)), Next::kOver);
}

TEST(Restarts, TheSameFailureTwiceSoonAfterTheStartIsHopeless) {
  Restarts restarts(9);
  EXPECT_EQ(restarts.judge(failed(1), seconds(1)), Next::kAgain);
  EXPECT_EQ(restarts.judge(failed(2), seconds(1)), Next::kAgain) << "another one";
  EXPECT_EQ(restarts.judge(failed(2), Restarts::kQuick), Next::kAgain) << "after a while";
  EXPECT_EQ(restarts.judge(failed(2), seconds(1)), Next::kAgain);
  EXPECT_EQ(restarts.judge(failed(2), seconds(1)), Next::kHopeless);
}

TEST(Restarts, PauseLongerFromTimeToTimeUpToAMinute) {
  Restarts restarts(100);
  std::vector<milliseconds> pauses;
  for (int i = 0; i < 20; ++i) {
    restarts.judge(failed(1), seconds(100));
    pauses.push_back(restarts.pause());
  }
  EXPECT_EQ(pauses[0], milliseconds(500));
  EXPECT_EQ(pauses[1], milliseconds(1000));
  EXPECT_EQ(pauses[2], milliseconds(2000));
  EXPECT_EQ(pauses[19], seconds(60));
}

}  // namespace
}  // namespace lamina::launch
