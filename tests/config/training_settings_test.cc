// SPDX-License-Identifier: Apache-2.0
#include "lamina/config/training_settings.h"

#include <map>
#include <sstream>

#include "lamina/base/str.h"
#include "tests/config/config_fixture.h"

namespace lamina::config {
namespace {

TrainingArguments arguments(const std::string& name, const std::string& json) {
  TrainingArguments given{.notation = Notation::kJson, .ranks = 2};
  (name == "fsdp_config" ? given.fsdp_config : given.deepspeed_config) = user_value(json, name);
  return given;
}

std::map<std::string, std::string> keys(const TrainingArguments& given) {
  std::map<std::string, std::string> found;
  for (const auto& [key, value] : training_settings(given).keys) found[key] = show(value);
  return found;
}

std::string error(const TrainingArguments& given) {
  return config_error([&] { training_settings(given); });
}

// The error about a key with this value in a section, "" for the configuration itself.
std::string error_of(const std::string& config, const std::string& section, const std::string& key,
                     const std::string& value = "true") {
  const auto inner = base::str("{", show(key), ": ", value, "}");
  return error(arguments(config, section.empty() ? inner : base::str("{", show(section), ": ", inner, "}")));
}

using Texts = std::map<std::string, std::string>;

Texts with(Texts keys, const Texts& more) {
  for (const auto& [key, value] : more) keys[key] = value;
  return keys;
}

TEST(TrainingSettings, EachLayoutHasItsKeys) {
  const Texts usual{
      {"ddp", "true"}, {"fp16", "false"}, {"bf16", "false"}, {"reduce_dtype", "null"}, {"buffer_dtype", "null"}};
  const Texts whole = with(usual, {{"sharded_data_parallel_degree", "1"}, {"shard_optimizer_state", "false"}});
  const Texts shards = with(usual, {{"sharded_data_parallel_degree", "2"},
                                    {"sdp_param_persistence_threshold", "0"},
                                    {"sdp_gradient_clipping", "null"},
                                    {"sdp_reshard_after_forward", "true"},
                                    {"sdp_reshard_after_backward", "true"}});
  const Texts fsdp = with(shards, {{"sdp_backward_prefetch", "\"post\""}});
  EXPECT_EQ(keys(arguments("fsdp_config", "{}")), fsdp);
  EXPECT_EQ(keys(arguments("fsdp_config", R"({"sharding_strategy": "shard_grad_op"})")),
            with(fsdp, {{"sdp_reshard_after_forward", "false"}}));
  EXPECT_EQ(keys(arguments("fsdp_config", R"({"sharding_strategy": "NO_SHARD"})")), whole);
  EXPECT_EQ(keys(arguments("deepspeed_config", "{}")), whole);
  const auto stage = [](int stage) {
    return keys(arguments("deepspeed_config", base::str(R"({"zero_optimization": {"stage": )", stage, "}}")));
  };
  EXPECT_EQ(stage(1), with(whole, {{"shard_optimizer_state", "true"}}));
  EXPECT_EQ(stage(2), with(shards, {{"sdp_reshard_after_forward", "false"}, {"sdp_reshard_after_backward", "false"}}));
  EXPECT_EQ(stage(3), shards);
}

TEST(TrainingSettings, TheirKeysAreOnesOfInit) {
  for (const auto& [config, json] : std::map<std::string, std::string>{
           {"fsdp_config",
            R"({"mixed_precision": "PURE", "activation_checkpointing": true, "activation_cpu_offload": true})"},
           {"deepspeed_config", R"({"bf16": {"enabled": true}, "zero_optimization": {"stage": 3,
              "reduce_bucket_size": "5e6", "max_live_parameters": 7, "stage3_param_persistence_threshold": 3}})"}}) {
    std::string text;
    for (const auto& [key, value] : keys(arguments(config, json))) {
      text += base::str(text.empty() ? "{" : ", ", show(key), ": ", value);
    }
    EXPECT_NO_THROW(parsed(text + "}")) << text;
  }
}

TEST(TrainingSettings, AMisspeltKeyIsNamedWithTheNearest) {
  for (const auto& [config, section] :
       std::vector<std::pair<std::string, std::string>>{{"fsdp_config", ""},
                                                        {"fsdp_config", "mixed_precision"},
                                                        {"deepspeed_config", ""},
                                                        {"deepspeed_config", "zero_optimization"},
                                                        {"deepspeed_config", "fp16"},
                                                        {"deepspeed_config", "bf16"},
                                                        {"deepspeed_config", "data_types"}}) {
    const auto all = error_of(config, section, "~~~~~~~~~~~~~~~~~~~~");
    const std::string begin = "there are ";
    std::istringstream names(all.substr(all.find(begin) + begin.size()));
    int count = 0;
    for (std::string name; std::getline(names >> std::ws, name, ','); ++count) {
      const auto text = error_of(config, section, name + "_");
      EXPECT_NE(text.find(base::str(show(name + "_"), "]: no key is called so; the nearest is ", name)),
                std::string::npos)
          << text;
    }
    EXPECT_GT(count, 2);
  }
}

TEST(TrainingSettings, AWrongValueIsSaidInTheLanguageOfItsConfiguration) {
  const std::string begin = "configuration of the Trainer: 1 error\n  ";
  EXPECT_EQ(error_of("fsdp_config", "", "verbose", "1"),
            begin + R"(fsdp_config["verbose"]: 1 is not allowed; expected true or false)");
  EXPECT_EQ(error_of("fsdp_config", "", "min_params", "-1"),
            begin + R"(fsdp_config["min_params"]: -1 is not allowed; expected a number, 0 or more)");
  EXPECT_EQ(
      error_of("deepspeed_config", "zero_optimization", "stage", "4"),
      begin + R"(deepspeed_config["zero_optimization"]["stage"]: 4 is not allowed; expected a whole number, 0 to 3)");
  EXPECT_EQ(error_of("deepspeed_config", "", "fp32_allreduce"),
            begin + R"(deepspeed_config["fp32_allreduce"]: true: communication_data_type says it; expected false)");
  EXPECT_EQ(error(arguments("fsdp_config", "[]")), begin + "fsdp_config: [] is not allowed; expected a dictionary");
}

TEST(TrainingSettings, AllThatIsWrongIsNamedAtOnce) {
  auto given = arguments("fsdp_config", R"({"min_params": -1, "verbos": true})");
  given.deepspeed_config = user_value(R"({"train_batch_size": 5})", "deepspeed_config");
  given.precision = {"fp8", "\"fp8\""};
  given.batch_size = 4;
  const auto text = error(given);
  for (const auto* part :
       {"5 errors", "precision=\"fp8\"", "min_params", "verbose", "5, but the Trainer has 8: 2 x 4", "both given"}) {
    EXPECT_NE(text.find(part), std::string::npos) << text;
  }
}

TEST(TrainingSettings, OwnKeysMayBeAddedAndMayNotContradict) {
  auto given = arguments("fsdp_config", "{}");
  given.own = user_value(R"({"partitions": 2, "ddp": false, "sharded_data_parallel_degree": 1})", "lamina_config");
  given.ranks = 8;
  EXPECT_EQ(
      error(given),
      "configuration of the Trainer: 2 errors\n"
      "  lamina_config[\"ddp\"]: false, but FULL_SHARD with precision fp32 makes it true\n"
      "  lamina_config[\"sharded_data_parallel_degree\"]: 1, but FULL_SHARD shards over more of the 4 copies of the "
      "model");
  given.own = user_value(R"({"partitions": 2})", "lamina_config");
  EXPECT_EQ(keys(given)["sharded_data_parallel_degree"], "4");
}

TEST(TrainingSettings, ALossScaleIsTheOptimizersWhereTheModelIsHalf) {
  const auto half =
      training_settings(arguments("deepspeed_config", R"({"fp16": {"enabled": true, "loss_scale": 128}})"));
  EXPECT_FALSE(half.scales_losses);
  EXPECT_EQ(half.optimizer_scale->fixed, 128);
  auto full = arguments("fsdp_config", "{}");
  full.precision = {"amp", "\"amp\""};
  EXPECT_TRUE(training_settings(full).scales_losses);
  EXPECT_FALSE(training_settings(full).optimizer_scale);
}

TEST(TrainingSettings, KeysThatChangeNoResultAreTold) {
  const auto found = training_settings(arguments("fsdp_config", R"({"use_orig_params": true, "verbose": true})"));
  EXPECT_EQ(found.without_effect, (std::vector<std::string>{"fsdp_config[\"use_orig_params\"]"}));
}

}  // namespace
}  // namespace lamina::config
