// SPDX-License-Identifier: Apache-2.0
#include "lamina/value/failure.h"

#include <gtest/gtest.h>

#include <stdexcept>

#include "tests/value/sent.h"

namespace lamina::value {
namespace {

const Failure kFailure{"ValueError", "bad input", "Traceback of rank 3", base::Rank(3), Opaque{"pickle", "bytes", {}}};

TEST(Failure, ArrivesWhole) {
  const auto arrived = to_failure(sent(to_value(kFailure)));
  EXPECT_EQ(arrived.type, "ValueError");
  EXPECT_EQ(arrived.message, "bad input");
  EXPECT_EQ(arrived.traceback, "Traceback of rank 3");
  EXPECT_EQ(arrived.rank, base::Rank(3));
  EXPECT_EQ(arrived.object.as<Opaque>().bytes, "bytes");
}

TEST(Failure, ThrownAgainItSaysWhatWhereAndThenTheOtherRanksTraceback) {
  EXPECT_STREQ(RemoteFailure(kFailure).what(), "ValueError on rank 3: bad input\nTraceback of rank 3");
  EXPECT_STREQ(RemoteFailure({"E", "m", "", base::Rank(0), {}}).what(), "E on rank 0: m");
}

TEST(Failure, AnyOtherTreeIsMalformed) {
  const auto whole = to_value(kFailure).as<Tuple>().items;
  EXPECT_THROW(to_failure(None{}), base::FormatError);
  EXPECT_THROW(to_failure(List{whole}), base::FormatError);
  for (std::size_t part = 0; part < 4; ++part) {
    auto wrong = whole;
    wrong[part] = 0.5;
    EXPECT_THROW(to_failure(Tuple{wrong}), base::FormatError) << part;
    wrong.erase(wrong.begin() + static_cast<std::ptrdiff_t>(part));
    EXPECT_THROW(to_failure(Tuple{wrong}), base::FormatError) << part;
  }
}

Failure described(std::exception_ptr error) { return Failures().describe(error, base::Rank(4)); }

TEST(Failures, AnExceptionKeepsItsTypeAndItsText) {
  const auto failure = described(std::make_exception_ptr(std::out_of_range("too far")));
  EXPECT_EQ(failure.type, "std::out_of_range");
  EXPECT_EQ(failure.message, "too far");
  EXPECT_EQ(failure.rank, base::Rank(4));
  EXPECT_EQ(described(std::make_exception_ptr(base::UsageError("no"))).type, "lamina::base::UsageError");
}

TEST(Failures, AFailureOfAnotherRankStaysTheOneItWas) {
  const Failure first{"ValueError", "m", "traceback", base::Rank(1), Opaque{"pickle", "b", {}}};
  const auto failure = described(std::make_exception_ptr(RemoteFailure(first)));
  EXPECT_EQ(failure.type, "ValueError");
  EXPECT_EQ(failure.traceback, "traceback");
  EXPECT_EQ(failure.rank, base::Rank(1));
  EXPECT_EQ(failure.object.as<Opaque>().bytes, "b");
}

TEST(Failures, WhatIsNoExceptionIsDescribedToo) {
  EXPECT_NE(described(std::make_exception_ptr(3)).message.find("no std::exception"), std::string::npos);
}

}  // namespace
}  // namespace lamina::value
