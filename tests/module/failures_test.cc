// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <stdexcept>

#include "lamina/base/error.h"
#include "lamina/module/functions.h"

namespace lamina::module {
namespace {

value::Failure described(std::exception_ptr error) { return Failures().describe(error, base::Rank(4)); }

TEST(Failures, AnExceptionKeepsItsTypeAndItsText) {
  const auto failure = described(std::make_exception_ptr(std::out_of_range("too far")));
  EXPECT_EQ(failure.type, "std::out_of_range");
  EXPECT_EQ(failure.message, "too far");
  EXPECT_EQ(failure.rank, base::Rank(4));
  EXPECT_EQ(described(std::make_exception_ptr(base::UsageError("no"))).type, "lamina::base::UsageError");
}

TEST(Failures, AFailureOfAnotherRankStaysTheOneItWas) {
  const value::Failure first{"ValueError", "m", "traceback", base::Rank(1), value::Opaque{"pickle", "b", {}}};
  const auto failure = described(std::make_exception_ptr(value::RemoteFailure(first)));
  EXPECT_EQ(failure.type, "ValueError");
  EXPECT_EQ(failure.traceback, "traceback");
  EXPECT_EQ(failure.rank, base::Rank(1));
  EXPECT_EQ(failure.object.as<value::Opaque>().bytes, "b");
}

TEST(Failures, WhatIsNoExceptionIsDescribedToo) {
  EXPECT_NE(described(std::make_exception_ptr(3)).message.find("no std::exception"), std::string::npos);
}

TEST(Functions, AreCalledByNumberAndNamed) {
  Functions functions;
  functions.add("first", [](value::Value x) { return x; });
  const auto second = functions.add("second", [](value::Value x) { return x.as<std::int64_t>() + 1; });
  EXPECT_EQ(functions.name(second), "second");
  EXPECT_EQ(functions.call(second, "", std::int64_t{1}).as<std::int64_t>(), 2);
  EXPECT_THROW(functions.call(base::ModuleId(2), "", {}), std::out_of_range);
}

}  // namespace
}  // namespace lamina::module
