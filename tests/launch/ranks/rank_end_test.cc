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

TEST(Verdict, SuccessIsNoFailure) {
  Verdict verdict;
  verdict.add(kZero, {});
  EXPECT_FALSE(verdict.first());
  EXPECT_FALSE(verdict.certain());
}

TEST(Verdict, TheFirstOfTwoExitsIsTheFirstFailure) {
  Verdict verdict;
  verdict.add(kOne, {.code = 3});
  EXPECT_FALSE(verdict.certain());
  verdict.add(kZero, {.code = 1});
  EXPECT_EQ(verdict.first()->rank, kOne);
  EXPECT_EQ(verdict.others(), 1);
}

TEST(Verdict, AKilledRankGoesBeforeThePeersThatNoticed) {
  Verdict verdict;
  verdict.add(kZero, {.code = 1});
  verdict.add(kOne, {.signal = SIGABRT});
  EXPECT_EQ(verdict.first()->rank, kZero);
  verdict.add(kTwo, {.signal = SIGKILL});
  EXPECT_EQ(verdict.first()->rank, kTwo);
  EXPECT_EQ(verdict.others(), 2);
}

TEST(Verdict, TheFirstKilledRankIsCertain) {
  Verdict verdict;
  verdict.add(kOne, {.signal = SIGSEGV});
  EXPECT_TRUE(verdict.certain());
  verdict.add(kZero, {.signal = SIGKILL});
  EXPECT_EQ(verdict.first()->rank, kOne);
}

TEST(Verdict, ARankThatEndsBecauseOfAnotherGivesWayToIt) {
  Verdict verdict;
  verdict.add(kTwo, {.code = 1, .consequence = true});
  verdict.add(kZero, {.code = 1, .consequence = true});
  EXPECT_EQ(verdict.first()->rank, kTwo);
  EXPECT_FALSE(verdict.certain());
  verdict.add(kOne, {.code = 7});
  EXPECT_EQ(verdict.first()->rank, kOne);
  verdict.add(base::Rank(3), {.code = 8});
  EXPECT_EQ(verdict.first()->rank, kOne);
  EXPECT_EQ(verdict.others(), 3);
}

TEST(Verdict, WhoLeftIsNamedWhereItMayBeTheReason) {
  Verdict verdict;
  verdict.add(kOne, {.code = 1, .consequence = true});
  verdict.add(kTwo, {});
  EXPECT_EQ(verdict.left(), std::vector{kTwo});
  verdict.add(kZero, {.code = 3});
  EXPECT_EQ(verdict.left(), std::vector<base::Rank>());
}

TEST(Verdict, WhoLeftInTheMiddleOfAStepIsTheFirstFailureOnceAnotherFails) {
  Verdict verdict;
  verdict.add(kOne, {.left = RankEnd::Left::kInStep, .step = 4});
  EXPECT_FALSE(verdict.first());
  verdict.add(kZero, {.code = 1, .consequence = true});
  EXPECT_EQ(verdict.first()->rank, kOne);
  EXPECT_EQ(verdict.first()->end.exit_code(), 1);
  verdict.add(kTwo, {.code = 3});
  EXPECT_EQ(verdict.first()->rank, kOne);
  EXPECT_EQ(verdict.others(), 2);
}

TEST(Verdict, WhoLeftIsTheFirstFailureThoughNoticedLater) {
  Verdict verdict;
  verdict.add(kZero, {.signal = SIGABRT});
  verdict.add(kOne, {.left = RankEnd::Left::kInStep, .step = 4});
  EXPECT_EQ(verdict.first()->rank, kOne);
  EXPECT_EQ(verdict.others(), 1);
}

TEST(Verdict, EndsAfterTheCloseAreConsequences) {
  Verdict verdict;
  verdict.add(kOne, {.code = 3});
  verdict.close();
  EXPECT_TRUE(verdict.certain());
  verdict.add(kZero, {.signal = SIGTERM});  // ended by us
  verdict.add(kTwo, {});                    // handled our SIGTERM
  EXPECT_EQ(verdict.first()->rank, kOne);
  EXPECT_EQ(verdict.others(), 2);
}

TEST(Verdict, AnInterruptedJobHasNoFailure) {
  Verdict verdict;
  verdict.close();
  verdict.add(kZero, {.signal = SIGTERM});
  EXPECT_FALSE(verdict.first());
}

}  // namespace
}  // namespace lamina::launch
