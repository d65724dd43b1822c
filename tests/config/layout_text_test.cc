// SPDX-License-Identifier: Apache-2.0
#include "lamina/config/layout_text.h"

#include <gtest/gtest.h>

#include "lamina/base/error.h"

namespace lamina::config {
namespace {

Config pipeline() {
  Config config;
  config.partitions = 4;
  config.microbatches = 8;
  config.ddp = config.shard_optimizer_state = true;
  config.default_partition = 3;
  return with_defaults(config);
}

TEST(InLayout, ReplacesWhatItNamesAndWhatFollowsFromIt) {
  Config wanted = pipeline();
  wanted.partitions = 2, wanted.microbatches = 1, wanted.deterministic_server = true;
  wanted.active_microbatches = default_window(2), wanted.default_partition = 0;
  EXPECT_EQ(in_layout(pipeline(), "pp=2,microbatches=1,deterministic_server=1"), wanted);
  EXPECT_EQ(in_layout(pipeline(), "pipeline_parallel_degree=2,microbatches=1,deterministic_server=true"), wanted);
  EXPECT_EQ(in_layout(pipeline(), ""), pipeline());
}

TEST(InLayout, HasNoneOfThatOfOneDevice) {
  Config plain = collapsed(pipeline());
  plain.active_microbatches = default_window(1);
  EXPECT_EQ(in_layout(pipeline(), "pp=1,tp=1,shards=1"), plain);
}

TEST(InLayout, NamesAllThatIsWrong) {
  try {
    in_layout(pipeline(), "pp=0,partition=2,ddp,optimize=fast,seed=7");
    FAIL();
  } catch (const base::ConfigError& error) {
    const std::string text = error.what();
    EXPECT_NE(text.find("layout: 4 errors"), std::string::npos) << text;
    EXPECT_NE(text.find("pp: 0 is not allowed; expected an integer, at least 1"), std::string::npos) << text;
    EXPECT_NE(text.find("partition: there is no such key; the nearest is partitions"), std::string::npos) << text;
    EXPECT_NE(text.find("ddp: without a value is not allowed; expected KEY=VALUE"), std::string::npos) << text;
    EXPECT_NE(text.find("optimize: \"fast\" is not allowed"), std::string::npos) << text;
  }
}

}  // namespace
}  // namespace lamina::config
