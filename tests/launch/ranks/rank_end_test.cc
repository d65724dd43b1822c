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

constexpr base::Rank kZero(0), kOne(1), kTwo(2);

TEST(RootCause, SuccessIsNoFailure) {
  RootCause root_cause;
  root_cause.add(kZero, {});
  EXPECT_FALSE(root_cause.first());
  EXPECT_FALSE(root_cause.certain());
}

TEST(RootCause, TheFirstOfTwoExitsIsTheFirstFailure) {
  RootCause root_cause;
  root_cause.add(kOne, {.code = 3});
  EXPECT_FALSE(root_cause.certain());
  root_cause.add(kZero, {.code = 1});
  EXPECT_EQ(root_cause.first()->rank, kOne);
  EXPECT_EQ(root_cause.others(), 1);
}

TEST(RootCause, AKilledRankGoesBeforeThePeersThatNoticed) {
  RootCause root_cause;
  root_cause.add(kZero, {.code = 1});
  root_cause.add(kOne, {.signal = SIGABRT});
  EXPECT_EQ(root_cause.first()->rank, kZero);
  root_cause.add(kTwo, {.signal = SIGKILL});
  EXPECT_EQ(root_cause.first()->rank, kTwo);
  EXPECT_EQ(root_cause.others(), 2);
}

TEST(RootCause, TheFirstKilledRankIsCertain) {
  RootCause root_cause;
  root_cause.add(kOne, {.signal = SIGSEGV});
  EXPECT_TRUE(root_cause.certain());
  root_cause.add(kZero, {.signal = SIGKILL});
  EXPECT_EQ(root_cause.first()->rank, kOne);
}

TEST(RootCause, ARankThatEndsBecauseOfAnotherGivesWayToIt) {
  RootCause root_cause;
  root_cause.add(kTwo, {.code = 1, .consequence = true});
  root_cause.add(kZero, {.code = 1, .consequence = true});
  EXPECT_EQ(root_cause.first()->rank, kTwo);
  EXPECT_FALSE(root_cause.certain());
  root_cause.add(kOne, {.code = 7});
  EXPECT_EQ(root_cause.first()->rank, kOne);
  root_cause.add(base::Rank(3), {.code = 8});
  EXPECT_EQ(root_cause.first()->rank, kOne);
  EXPECT_EQ(root_cause.others(), 3);
}

TEST(RootCause, WhoLeftIsNamedWhereItMayBeTheReason) {
  RootCause root_cause;
  root_cause.add(kOne, {.code = 1, .consequence = true});
  root_cause.add(kTwo, {});
  EXPECT_EQ(root_cause.left(), std::vector{kTwo});
  root_cause.add(kZero, {.code = 3});
  EXPECT_EQ(root_cause.left(), std::vector<base::Rank>());
}

TEST(RootCause, WhoLeftInTheMiddleOfAStepIsTheFirstFailureOnceAnotherFails) {
  RootCause root_cause;
  root_cause.add(kOne, {.left = RankEnd::Left::kInStep, .step = 4});
  EXPECT_FALSE(root_cause.first());
  root_cause.add(kZero, {.code = 1, .consequence = true});
  EXPECT_EQ(root_cause.first()->rank, kOne);
  EXPECT_EQ(root_cause.first()->end.exit_code(), 1);
  root_cause.add(kTwo, {.code = 3});
  EXPECT_EQ(root_cause.first()->rank, kOne);
  EXPECT_EQ(root_cause.others(), 2);
}

TEST(RootCause, WhoLeftIsTheFirstFailureThoughNoticedLater) {
  RootCause root_cause;
  root_cause.add(kZero, {.signal = SIGABRT});
  root_cause.add(kOne, {.left = RankEnd::Left::kInStep, .step = 4});
  EXPECT_EQ(root_cause.first()->rank, kOne);
  EXPECT_EQ(root_cause.others(), 1);
}

TEST(RootCause, EndsAfterTheCloseAreConsequences) {
  RootCause root_cause;
  root_cause.add(kOne, {.code = 3});
  root_cause.close();
  EXPECT_TRUE(root_cause.certain());
  root_cause.add(kZero, {.signal = SIGTERM});  // ended by us
  root_cause.add(kTwo, {});                    // handled our SIGTERM
  EXPECT_EQ(root_cause.first()->rank, kOne);
  EXPECT_EQ(root_cause.others(), 2);
}

TEST(RootCause, AnInterruptedJobHasNoFailure) {
  RootCause root_cause;
  root_cause.close();
  root_cause.add(kZero, {.signal = SIGTERM});
  EXPECT_FALSE(root_cause.first());
}

}  // namespace
}  // namespace lamina::launch
