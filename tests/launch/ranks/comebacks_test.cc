// SPDX-License-Identifier: Apache-2.0
#include "lamina/launch/ranks/comebacks.h"

#include <gtest/gtest.h>

#include <csignal>

namespace lamina::launch {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr RankEnd kKilled{.signal = SIGKILL}, kTold{.signal = SIGTERM};

Comebacks::Time at(milliseconds since) { return Comebacks::Time(since); }

TEST(Comebacks, StartAgainAfterAPause) {
  Comebacks comebacks;
  comebacks.began(1, at(seconds(0)));
  EXPECT_EQ(comebacks.ended(1, kKilled, at(seconds(20))), milliseconds(500));
  EXPECT_EQ(comebacks.next(), at(milliseconds(20500)));
  EXPECT_EQ(comebacks.due(at(milliseconds(20499))), std::nullopt);
  EXPECT_EQ(comebacks.due(at(milliseconds(20500))), 1);
  EXPECT_EQ(comebacks.due(at(seconds(30))), std::nullopt) << "once";
  EXPECT_EQ(comebacks.next(), std::nullopt);
}

TEST(Comebacks, PauseLongerWhereARankEndsSoonAndAsBriefAsEverWhereItDoesNot) {
  Comebacks comebacks;
  milliseconds now = seconds(1);
  comebacks.began(0, at(seconds(0)));
  std::vector<milliseconds> pauses;
  for (int i = 0; i < 9; ++i) {  // each time in another way
    pauses.push_back(*comebacks.ended(0, i % 2 == 0 ? kKilled : kTold, at(now)));
    now += pauses.back();
    EXPECT_EQ(comebacks.due(at(now)), 0);
    comebacks.began(0, at(now));
    now += seconds(1);
  }
  EXPECT_EQ(pauses[1], seconds(1));
  EXPECT_EQ(pauses[2], seconds(2));
  EXPECT_EQ(pauses[8], seconds(60)) << "and no longer";
  EXPECT_NE(comebacks.ended(0, kTold, at(now + seconds(20))), std::nullopt);
  comebacks.began(0, at(now + seconds(100)));
  EXPECT_EQ(comebacks.ended(0, kTold, at(now + seconds(120))), milliseconds(500));
}

TEST(Comebacks, TheSameEndTwiceSoonAfterTheStartGivesThePlaceUp) {
  Comebacks comebacks;
  comebacks.began(2, at(seconds(0)));
  comebacks.began(3, at(seconds(0)));
  EXPECT_NE(comebacks.ended(2, kKilled, at(seconds(1))), std::nullopt);
  EXPECT_NE(comebacks.ended(3, kKilled, at(seconds(1))), std::nullopt) << "of another place";
  EXPECT_EQ(comebacks.due(at(seconds(2))), 2);
  comebacks.began(2, at(seconds(2)));
  EXPECT_EQ(comebacks.ended(2, kKilled, at(seconds(3))), std::nullopt);
  EXPECT_EQ(comebacks.due(at(seconds(4))), 3);
  EXPECT_EQ(comebacks.due(at(seconds(90))), std::nullopt);
}

}  // namespace
}  // namespace lamina::launch
