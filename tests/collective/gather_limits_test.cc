// SPDX-License-Identifier: Apache-2.0
#include "lamina/collective/gather_limits.h"

#include <gtest/gtest.h>

#include <map>

#include "lamina/base/error.h"
#include "tests/message_of.h"

namespace lamina::collective {
namespace {

GatherLimits read(const std::map<std::string, std::string>& variables) {
  return read_gather_limits([&](const std::string& name) {
    const auto found = variables.find(name);
    return found == variables.end() ? std::nullopt : std::optional(found->second);
  });
}

TEST(GatherLimits, AreMultiplesOf8192FromTheEnvironment) {
  EXPECT_EQ(read({}), (GatherLimits{16777216, 134217728}));
  EXPECT_EQ(read({{"SMDDP_AG_SCRATCH_BUFFER_SIZE_BYTES", "8192"}}), (GatherLimits{8192, 134217728}));
  EXPECT_EQ(read({{"SMDDP_AG_SORT_BUFFER_SIZE_BYTES", "8589934592"}}), (GatherLimits{16777216, 8589934592}));
  for (const std::string name : {"SMDDP_AG_SCRATCH_BUFFER_SIZE_BYTES", "SMDDP_AG_SORT_BUFFER_SIZE_BYTES"}) {
    for (const std::string text : {"", "8191", "8193", "0", "-8192", "8k", "16MiB", "8192.0", "99999999999999999999"}) {
      EXPECT_EQ(message_of<base::UsageError>([&] { read({{name, text}}); }),
                name + ": '" + text + "' is not allowed; expected a multiple of 8192");
    }
  }
}

TEST(GatherLimits, WhatIsTooLargeForABufferIsNotServed) {
  const GatherLimits limits{.scratch_bytes = 16384, .sort_bytes = 8192};
  EXPECT_EQ(why_too_large(limits, 4, 16384), "") << "an eighth of what all give fills the other one";
  EXPECT_EQ(why_too_large(limits, 4, 16385),
            "16385 bytes of each rank are more than SMDDP_AG_SCRATCH_BUFFER_SIZE_BYTES (16384)");
  EXPECT_EQ(why_too_large(limits, 8, 8192), "");
  EXPECT_EQ(why_too_large(limits, 8, 8193),
            "an eighth of 8 times 8193 bytes is more than SMDDP_AG_SORT_BUFFER_SIZE_BYTES (8192)");
  EXPECT_EQ(why_too_large({}, 64, 16777216), "") << "the defaults are made for 64";
  EXPECT_NE(why_too_large({}, 65, 16777216), "");
}

}  // namespace
}  // namespace lamina::collective
