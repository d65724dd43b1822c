// SPDX-License-Identifier: Apache-2.0
#include "lamina/session/admission.h"

#include <gtest/gtest.h>

namespace lamina::session {
namespace {

using namespace std::chrono_literals;

const Admission::Time kBegin = base::Clock::now();

Admission admission(base::Clock::duration every = 60s) {
  Admission made;
  made.set_every(every);
  return made;
}

Entrant by_hand(int node, int together, base::Clock::duration came) { return {node, together, kBegin + came}; }
Entrant back(base::Clock::duration came) { return {0, 0, kBegin + came}; }

TEST(Admission, LetsNobodyInWhereNobodyWaits) { EXPECT_FALSE(admission().may_enter({}, kBegin)); }

TEST(Admission, WaitsForAllThatALauncherHasBegun) {
  const auto door = admission();
  EXPECT_TRUE(door.may_enter({by_hand(7, 1, 0s)}, kBegin));
  EXPECT_FALSE(door.may_enter({by_hand(7, 2, 0s)}, kBegin));
  EXPECT_TRUE(door.may_enter({by_hand(7, 2, 0s), by_hand(7, 2, 1s)}, kBegin + 1s));
  EXPECT_FALSE(door.may_enter({by_hand(7, 2, 0s), by_hand(8, 2, 1s)}, kBegin + 1s)) << "one of each of two launchers";
  EXPECT_FALSE(door.may_enter({by_hand(7, 1, 0s), by_hand(8, 2, 1s)}, kBegin + 1s));
}

TEST(Admission, WaitsForThemTenSecondsAtMost) {
  const auto door = admission();
  const std::vector<Entrant> waiting{by_hand(7, 3, 0s), by_hand(7, 3, 9s)};
  EXPECT_FALSE(door.may_enter(waiting, kBegin + 9999ms));
  EXPECT_TRUE(door.may_enter(waiting, kBegin + 10s));
}

TEST(Admission, LetsManyWhoComeOneAfterTheOtherInByTwoChanges) {
  auto door = admission();
  std::vector<Entrant> waiting;
  int changes = 0;
  for (int second = 0; second < 70; ++second) {
    const auto now = kBegin + std::chrono::seconds(second);
    if (second < 40) waiting.push_back(by_hand(second, 1, std::chrono::seconds(second)));
    if (!door.may_enter(waiting, now)) continue;
    door.entered(waiting, now);
    EXPECT_EQ(waiting.size(), changes == 0 ? 1u : 39u);
    waiting.clear();
    ++changes;
  }
  EXPECT_EQ(changes, 2);
}

TEST(Admission, DoesNotDelayOneThatComesBackAndLetsTheOthersGoWithIt) {
  auto door = admission();
  door.entered({by_hand(7, 1, 0s)}, kBegin);
  EXPECT_FALSE(door.may_enter({by_hand(8, 1, 1s)}, kBegin + 1s));
  EXPECT_TRUE(door.may_enter({back(2s)}, kBegin + 2s));
  EXPECT_TRUE(door.may_enter({by_hand(8, 4, 1s), back(2s)}, kBegin + 2s));
  door.entered({by_hand(8, 4, 1s), back(2s)}, kBegin + 2s);
  EXPECT_FALSE(door.may_enter({by_hand(9, 1, 3s)}, kBegin + 61s)) << "counted from those by hand";
  EXPECT_TRUE(door.may_enter({by_hand(9, 1, 3s)}, kBegin + 62s));
}

TEST(Admission, CountsNoTimeFromThoseThatComeBack) {
  auto door = admission();
  door.entered({back(0s)}, kBegin);
  EXPECT_TRUE(door.may_enter({by_hand(7, 1, 1s)}, kBegin + 1s));
}

TEST(Admission, MayLetThemInAtOnce) {
  auto door = admission(0s);
  door.entered({by_hand(7, 1, 0s)}, kBegin);
  EXPECT_TRUE(door.may_enter({by_hand(8, 1, 0s)}, kBegin));
}

}  // namespace
}  // namespace lamina::session
