// SPDX-License-Identifier: Apache-2.0
#include "lamina/sharding/units.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>

namespace lamina::sharding {
namespace {

// The rule of each unit, and its parameters.
using Found = std::map<std::string, std::pair<std::string, std::vector<int>>>;

// A model with a root "net" of two blocks in a list, and a head; `sizes` of a block's parameters, and of the head's.
class UnitsTest : public ::testing::Test {
 protected:
  Found units(double least = 1e8) const {
    Found found;
    for (const auto& [name, rule, parameters] : units_by_rules(modules, sizes, least)) {
      found[name] = {std::string(name_of(rule)), parameters};
    }
    return found;
  }
  AskedModule& of(const std::string& name) { return *std::ranges::find(modules, name, &AskedModule::name); }

  std::vector<AskedModule> modules{{"", true, {}, false, {0, 1, 2, 3}},      {"net", true, {}, false, {0, 1, 2, 3}},
                                   {"net.blocks", false, {}, false, {0, 1}}, {"net.blocks.0", true, {}, false, {0}},
                                   {"net.blocks.1", true, {}, false, {1}},   {"net.head", true, {}, false, {2, 3}}};
  std::vector<std::int64_t> sizes{64, 64, 8, 4};
};

TEST_F(UnitsTest, TheRootTakesWhatNobodyIsAskedFor) { EXPECT_EQ(units(), (Found{{"net", {"root", {0, 1, 2, 3}}}})); }

TEST_F(UnitsTest, AWordCountsBeforeTheFunctionAndTheFunctionBeforeTheSize) {
  of("net.blocks.0").word = false;
  of("net.blocks.0").by_function = true;
  of("net.blocks.1").by_function = true;
  of("net.head").word = true;
  EXPECT_EQ(
      units(1),
      (Found{{"net", {"root", {0}}}, {"net.blocks.1", {"fsdp_wrap_fn", {1}}}, {"net.head", {"_fsdp_wrap", {2, 3}}}}));
}

TEST_F(UnitsTest, ASizeIsOfWhatIsInNoUnitYetAndAListIsNone) {
  EXPECT_EQ(
      units(63),
      (Found{{"net", {"root", {2, 3}}}, {"net.blocks.0", {"min_params", {0}}}, {"net.blocks.1", {"min_params", {1}}}}));
  EXPECT_EQ(units(64).size(), 1);
}

TEST_F(UnitsTest, ATiedParameterIsOfTheFirstThatHasIt) {
  of("net.head").parameters = {0, 2, 3};
  EXPECT_EQ(units(20).at("net.blocks.0").second, std::vector<int>{0});
  EXPECT_EQ(units(20).at("net").second, (std::vector<int>{2, 3}));
}

TEST_F(UnitsTest, ARootMayStayWholeAndSoDoesWhatIsInNone) {
  of("net").word = false;
  of("net.head").word = true;
  EXPECT_EQ(units(1), (Found{{"net", {"whole", {0, 1, 2, 3}}}}));
  modules.front().parameters.push_back(4);
  sizes.push_back(100);
  EXPECT_EQ(units(1).at("").second, std::vector<int>{4});
}

}  // namespace
}  // namespace lamina::sharding
