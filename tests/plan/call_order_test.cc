// SPDX-License-Identifier: Apache-2.0
#include "lamina/plan/call_order.h"

#include <gtest/gtest.h>

namespace lamina::plan {
namespace {

constexpr auto kNever = std::nullopt;

TEST(CallOrder, PutsChildrenInTheOrderOfTheirFirstCallsBelowTheirParents) {
  //  0 ─┬─ 1 ─┬─ 2
  //     │     └─ 3
  //     └─ 4 ─── 5
  EXPECT_EQ(call_order({-1, 0, 1, 1, 0, 4}, {0, 3, 5, 4, 1, 2}), (std::vector{0, 4, 5, 1, 3, 2}));
}

TEST(CallOrder, PutsAListOfModulesWhereItsFirstModuleIsCalled) {
  EXPECT_EQ(call_order({-1, 0, 1, 1, 0}, {0, kNever, 2, 3, 1}), (std::vector{0, 4, 1, 2, 3}));
  EXPECT_EQ(call_order({-1, 0, 1, 2, 0}, {0, kNever, kNever, 1, 2}), (std::vector{0, 1, 2, 3, 4}));
}

TEST(CallOrder, KeepsTheOrderOfTheTreeWhereNothingWasCalled) {
  EXPECT_EQ(call_order({-1, 0, 1, 0, 0}, {kNever, kNever, kNever, kNever, kNever}), (std::vector{0, 1, 2, 3, 4}));
  EXPECT_EQ(call_order({-1, 0, 0, 0}, {0, kNever, 1, kNever}), (std::vector{0, 2, 1, 3}));
  EXPECT_TRUE(call_order({}, {}).empty());
}

}  // namespace
}  // namespace lamina::plan
