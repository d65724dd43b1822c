// SPDX-License-Identifier: Apache-2.0
#include "lamina/model/functions.h"

#include <gtest/gtest.h>

#include <stdexcept>

namespace lamina::model {
namespace {

TEST(Functions, AreCalledByNumberAndNamed) {
  Functions functions;
  functions.add("first", [](value::Value x) { return x; });
  const auto second = functions.add("second", [](value::Value x) { return x.as<std::int64_t>() + 1; });
  EXPECT_EQ(functions.name(second), "second");
  EXPECT_EQ(functions.call(second, "", std::int64_t{1}).as<std::int64_t>(), 2);
  EXPECT_THROW(functions.call(base::ModuleId(2), "", {}), std::out_of_range);
}

}  // namespace
}  // namespace lamina::model
