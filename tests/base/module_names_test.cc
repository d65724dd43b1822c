// SPDX-License-Identifier: Apache-2.0
#include "lamina/base/module_names.h"

#include <gtest/gtest.h>

namespace lamina::base {
namespace {

TEST(ModuleNames, HoldTheModuleItselfAndWhatIsInsideOfIt) {
  EXPECT_TRUE(is_in_module("h.1", "h.1"));
  EXPECT_TRUE(is_in_module("h.1.bias", "h.1"));
  EXPECT_TRUE(is_in_module("h.1.bias", "h"));
}

TEST(ModuleNames, HoldNothingOfAModuleWhoseNameBeginsAlike) {
  EXPECT_FALSE(is_in_module("h.11.bias", "h.1"));
  EXPECT_FALSE(is_in_module("h", "h.1"));
  EXPECT_FALSE(is_in_module("x.h.1", "h.1"));
}

}  // namespace
}  // namespace lamina::base
