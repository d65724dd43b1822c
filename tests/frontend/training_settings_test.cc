// SPDX-License-Identifier: Apache-2.0
#include "lamina/frontend/training_settings.h"

#include <gtest/gtest.h>

#include "lamina/base/error.h"
#include "lamina/config/config.h"

namespace lamina {
namespace {

TEST(TrainingSettings, AProgramGetsTheConfigurationOfItsJobAndTheScaleOfItsOptimizer) {
  const auto found = training_settings({.deepspeed_config = R"({"fp16": {"enabled": true, "initial_scale_power": 4},
                                          "zero_optimization": {"stage": 1}, "gradient_clipping": 0.5,
                                          "train_batch_size": 8, "gradient_accumulation_steps": 2})",
                                        .own = R"({"microbatches": 2, "seed": 3})",
                                        .batch_size = 8});
  const auto config = config::parse_config({found.init_json}).config;
  EXPECT_TRUE(config.ddp && config.fp16 && config.shard_optimizer_state);
  EXPECT_EQ(config.microbatches, 2);
  EXPECT_EQ(config.seed, 3);
  EXPECT_EQ(found.clipping_norm, 0.5);
  EXPECT_TRUE(found.loss_scale.is_dynamic());
  EXPECT_EQ(found.loss_scale.value(), 16);
}

TEST(TrainingSettings, OwnKeysCountBeforeDefaultsOfALayout) {
  const auto found = training_settings({.fsdp_config = "{}", .own = R"({"sdp_param_persistence_threshold": 9})"});
  EXPECT_EQ(config::parse_config({found.init_json}).config.sdp_param_persistence_threshold, 9);
  EXPECT_FALSE(found.loss_scale.is_on());
  EXPECT_EQ(training_settings({}).init_json, "{}");
}

TEST(TrainingSettings, WhatIsNoJsonIsNamed) {
  EXPECT_THROW(training_settings({.fsdp_config = "{"}), base::ConfigError);
  EXPECT_THROW(training_settings({.own = "[]"}), base::ConfigError);
}

}  // namespace
}  // namespace lamina
