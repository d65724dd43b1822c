// SPDX-License-Identifier: Apache-2.0
#include "lamina/faces/sayings.h"

#include <gtest/gtest.h>

#include <set>

namespace lamina::faces {
namespace {

TEST(Sayings, HaveNamesOfTheirOwn) {
  std::set<std::string_view> names;
  for (const auto& saying : kSayings) EXPECT_TRUE(names.insert(saying.name).second) << saying.name;
}

TEST(Sayings, TakeAValueForEachPlace) {
  EXPECT_EQ(said("no-axis", "argument 0 of shape [2]", 3), "argument 0 of shape [2] has no axis 3 to split it along");
  EXPECT_EQ(fill("{}{}", {"{}", "b"}), "{}b");
  EXPECT_THROW(fill("{}", {}), base::InternalError);
  EXPECT_THROW(fill("a", {"b"}), base::InternalError);
}

TEST(Sayings, AreErrorsWithTheirCodes) {
  const auto error = refusal("job-ended", "optimizer.step()", "DistributedOptimizer");
  EXPECT_STREQ(error.code(), "step-after-shutdown");
  EXPECT_STREQ(error.what(),
               "optimizer.step() of a DistributedOptimizer whose job was shut down [step-after-shutdown]\nmore: lamina "
               "explain step-after-shutdown");
}

}  // namespace
}  // namespace lamina::faces
