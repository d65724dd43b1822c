// SPDX-License-Identifier: Apache-2.0
#include "lamina/session/keep_pace.h"

#include <gtest/gtest.h>

namespace lamina::session {
namespace {

TEST(KeepPace, VersionsTakeTheirPartOfTheTime) {
  EXPECT_EQ(updates_between(0.01, 1.0, 10, 0.02), 5);      // 10 ms each 500 ms
  EXPECT_EQ(updates_between(0.011, 1.0, 10, 0.02), 6);     // no more than the part
  EXPECT_EQ(updates_between(0.0001, 1.0, 10, 0.02), 1);    // with each update
  EXPECT_EQ(updates_between(1.0, 0.0, 3, 0.02), 1000000);  // a clock that stands still
}

TEST(KeepPace, AGivenNumberOfUpdatesLiesBetweenTwo) {
  KeepPace pace(3);
  pace.go_on_from(7);
  EXPECT_FALSE(pace.is_due(9));
  EXPECT_TRUE(pace.is_due(10));
}

TEST(KeepPace, EachUpdateIsDueBeforeOneIsMeasured) {
  KeepPace pace(std::nullopt);
  pace.go_on_from(7);
  EXPECT_FALSE(pace.is_due(7));
  EXPECT_TRUE(pace.is_due(8));
}

}  // namespace
}  // namespace lamina::session
