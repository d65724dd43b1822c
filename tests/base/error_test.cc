// SPDX-License-Identifier: Apache-2.0
#include "lamina/base/error.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "lamina/base/coded.h"

namespace lamina::base {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

TEST(Error, TheFirstLineOfItsMessageEndsWithItsCodeAndTheLastSaysHowToReadMore) {
  EXPECT_STREQ(UsageError("no", Code{"step-mismatch"}).what(),
               "no [step-mismatch]\nmore: lamina explain step-mismatch");
  EXPECT_STREQ(UsageError("no\n  for this\n  and that\n", Code{"step-mismatch"}).what(),
               "no [step-mismatch]\n  for this\n  and that\nmore: lamina explain step-mismatch");
  EXPECT_STREQ(DesyncError("no", Code{"step-mismatch"}).code(), "step-mismatch");
  EXPECT_STREQ(PeerError("gone", std::nullopt, Code{"group-lost"}).what(),
               "gone [group-lost]\nmore: lamina explain group-lost");
}

TEST(Error, ThatTakesInAnotherOneSaysHowToReadMoreOnce) {
  const UsageError inner("no", Code{"step-mismatch"});
  const std::string around = std::string("before: ") + inner.what() + "; after\n" + inner.what() + "\n";
  EXPECT_STREQ(UsageError(around).what(),
               "before: no [step-mismatch]; after\nno [step-mismatch]\nmore: lamina explain step-mismatch");
  EXPECT_STREQ(UsageError(UsageError(around).what()).what(), UsageError(around).what());
  EXPECT_STREQ(UsageError(inner.what(), Code{"group-lost"}).what(),
               "no [step-mismatch] [group-lost]\nmore: lamina explain group-lost");
}

TEST(Error, IsALineAndItsHintApart) {
  const UsageError error("no", Code{"step-mismatch"});
  EXPECT_EQ(without_hints(error.what()), "no [step-mismatch]");
  EXPECT_EQ(hint_of(error.what()), "\nmore: lamina explain step-mismatch");
  EXPECT_EQ(hint_of("no"), "");
}

TEST(Error, WithoutACodeSaysWhatItWasGiven) {
  EXPECT_STREQ(UsageError("no\nmore").what(), "no\nmore");
  EXPECT_STREQ(PeerError("gone").code(), "");
}

TEST(Error, HasNothingThatATerminalObeysAndIsNotCutAtANul) {
  EXPECT_STREQ(UsageError(std::string("no \x1b[31mred\0 and more\nnext", 26), Code{"step-mismatch"}).what(),
               "no \\x1b[31mred\\x00 and more [step-mismatch]\nnext\nmore: lamina explain step-mismatch");
}

TEST(InternalErrorTest, SaysThatItIsABugAndWhereItWasFoundAndWhatToReport) {
  const int line = __LINE__ + 1;
  const InternalError error("two beginnings of a step");
  EXPECT_THAT(error.what(), StartsWith("a bug of lamina: two beginnings of a step ("));
  EXPECT_THAT(error.what(), HasSubstr("error_test.cc:" + std::to_string(line) + ")"));
  EXPECT_THAT(error.what(), HasSubstr("report it with the log of all ranks"));
}

TEST(InternalErrorTest, IsThrownByACheckThatDoesNotHoldAndNamesTheChecksLine) {
  EXPECT_NO_THROW(internal_check(true, "nothing"));
  const int line = __LINE__ + 2;
  try {
    internal_check(1 + 1 == 3, "two beginnings of a step");
    FAIL();
  } catch (const InternalError& error) {
    EXPECT_THAT(error.what(), HasSubstr(":" + std::to_string(line) + ")"));
  }
}

}  // namespace
}  // namespace lamina::base
