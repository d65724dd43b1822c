// SPDX-License-Identifier: Apache-2.0
#include "lamina/base/error.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace lamina::base {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

TEST(Error, TheFirstLineOfItsMessageEndsWithItsCode) {
  EXPECT_STREQ(UsageError("no", Code{"step-mismatch"}).what(), "no [step-mismatch]");
  EXPECT_STREQ(UsageError("no\n  for this\n  and that", Code{"step-mismatch"}).what(),
               "no [step-mismatch]\n  for this\n  and that");
  EXPECT_STREQ(DesyncError("no", Code{"step-mismatch"}).code(), "step-mismatch");
  EXPECT_STREQ(PeerError("gone", std::nullopt, Code{"group-lost"}).what(), "gone [group-lost]");
}

TEST(Error, WithoutACodeSaysWhatItWasGiven) {
  EXPECT_STREQ(UsageError("no\nmore").what(), "no\nmore");
  EXPECT_STREQ(PeerError("gone").code(), "");
}

TEST(Error, HasNothingThatATerminalObeysAndIsNotCutAtANul) {
  EXPECT_STREQ(UsageError(std::string("no \x1b[31mred\0 and more\nnext", 26), Code{"step-mismatch"}).what(),
               "no \\x1b[31mred\\x00 and more [step-mismatch]\nnext");
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
