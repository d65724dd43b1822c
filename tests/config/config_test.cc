// SPDX-License-Identifier: Apache-2.0
#include "lamina/config/config.h"

#include "lamina/base/str.h"
#include "lamina/config/graph_config.h"
#include "lamina/config/sources.h"
#include "tests/config/config_fixture.h"

namespace lamina::config {
namespace {

TEST(Config, NothingGivenMeansOnePartitionAndOneMicrobatch) {
  const Config config = parsed("{}");
  EXPECT_EQ(config.partitions, 1);
  EXPECT_EQ(config.microbatches, 1);
  EXPECT_EQ(config.schedule, Schedule::kInterleaved);
  EXPECT_EQ(config, with_defaults(Config{}));
}

TEST(Config, DefaultsFollowTheKeysTheyDependOn) {
  EXPECT_EQ(parsed(R"({"partitions": 3})").active_microbatches, 7);
  EXPECT_EQ(parsed(R"({"optimize": "speed"})").memory_weight, 0.2);
  EXPECT_EQ(parsed("{}").memory_weight, 0.8);
  EXPECT_EQ(parsed("{}").default_partition, 0);
  EXPECT_EQ(parsed("{}").ddp_dist_backend, std::nullopt);
  EXPECT_EQ(parsed(R"({"ddp": true})").ddp_dist_backend, DistBackend::kAuto);
}

TEST(Config, SilenceEndsBeforeWaitsDo) {
  EXPECT_EQ(silence_of(parsed("{}"), false), std::nullopt);
  EXPECT_EQ(silence_of(parsed("{}"), true), 30.0);
  EXPECT_EQ(silence_of(parsed(R"({"timeout_s": 10})"), true), 5.0);
  for (const bool outlives : {false, true}) EXPECT_EQ(silence_of(parsed(R"({"silent_s": 7})"), outlives), 7.0);
}

TEST(Config, BothShapesAreTheSameConfiguration) {
  const std::string bare = R"({"partitions": 2, "pipeline": "simple"})";
  EXPECT_EQ(parsed(bare), parsed(R"({"enabled": true, "parameters": )" + bare + "}"));
  EXPECT_EQ(parsed(bare), parsed(R"({"parameters": )" + bare + "}"));
}

TEST(Config, KeysOutsideTheParametersAreErrors) {
  EXPECT_EQ(parse_error(R"({"enabled": 1, "parameters": 2, "partitions": 3})"),
            "configuration: 3 errors\n"
            "  enabled: 1 is not allowed; expected true or false\n"
            "  parameters: 2 is not allowed; expected an object with the parameters\n"
            "  partitions: 3 is not allowed beside \"enabled\" and \"parameters\"; expected inside \"parameters\"");
}

TEST(Config, ADisabledConfigurationIsCheckedButNotUsed) {
  const ParsedConfig off = parse_config({R"({"enabled": false, "parameters": {"partitions": 4}})", {}, true});
  EXPECT_EQ(off.config, parsed("{}"));
  EXPECT_EQ(off.warnings.size(), 1u);
  EXPECT_NE(parse_error(R"({"enabled": false, "parameters": {"partitions": 0}})"), "");
}

TEST(Config, AllErrorsComeAtOnceInAnOrderThatDoesNotDependOnTheText) {
  const std::string expected =
      "configuration: 4 errors\n"
      "  microbatches: \"8\" is not allowed; expected an integer, at least 1\n"
      "  partition: 2 is not allowed, there is no such key; the nearest is partitions\n"
      "  placement_strategy: \"close\" is not allowed; expected \"cluster\", \"spread\" or the letters D, P and T in "
      "any "
      "order\n"
      "  ddp_port: 80 needs ddp: true; set it, or leave ddp_port out";
  EXPECT_EQ(parse_error(R"({"partition":2,"microbatches":"8","placement_strategy":"close","ddp_port":80})"), expected);
  EXPECT_EQ(parse_error(R"({"ddp_port":80,"placement_strategy":"close","microbatches":"8","partition":2})"), expected);
}

TEST(Config, TwoNamesOfOneKeyMustAgree) {
  EXPECT_EQ(parsed(R"({"partitions": 2, "pipeline_parallel_degree": 2})").partitions, 2);
  EXPECT_EQ(parsed(R"({"pipeline_parallel_degree": 4})").partitions, 4);
  EXPECT_EQ(parsed(R"({"pipeline": "simple", "schedule": "simple"})").schedule, Schedule::kSimple);
  EXPECT_EQ(
      parse_error(R"({"partitions": 2, "pipeline_parallel_degree": 4})"),
      "configuration: 1 error\n  pipeline_parallel_degree: 4 is not allowed with partitions: 2; they are two names "
      "of one key, expected the same value");
}

TEST(Config, RulesBetweenKeys) {
  const std::vector<std::pair<std::string, std::string>> broken{
      {R"({"auto_partition": false})", "default_partition: null is not allowed when auto_partition is false"},
      {R"({"partitions": 2, "default_partition": 2})", "default_partition: 2 is not allowed with partitions: 2"},
      {R"({"pipeline_parallel_degree": 2, "default_partition": 5})", "expected an integer from 0 to 1"},
      {R"({"tensor_parallel_degree": 2})", "tensor_parallel_degree: 2 needs ddp: true"},
      {R"({"sharded_data_parallel_degree": 2})", "sharded_data_parallel_degree: 2 needs ddp: true"},
      {R"({"ddp_port": 0})", "ddp_port: 0 needs ddp: true"},
      {R"({"ddp_dist_backend": "auto"})", "ddp_dist_backend: \"auto\" needs ddp: true"},
      {R"({"reduce_dtype": "bf16"})", "reduce_dtype: \"bf16\" needs ddp: true"},
      {R"({"ddp": true, "horovod": true})", "ddp: true is not allowed together with horovod: true"},
      {R"({"sdp_reshard_after_backward": false})",
       "sdp_reshard_after_backward: false needs sdp_reshard_after_forward: false"},
      {R"({"fp16": true, "bf16": true})", "fp16: true is not allowed together with bf16: true"},
      {R"({"timeout_s": 20, "silent_s": 20})", "silent_s: 20 is not allowed with timeout_s: 20"},
  };
  for (const auto& [json, text] : broken) {
    EXPECT_NE(parse_error(json).find("configuration: 1 error\n  "), std::string::npos) << json;
    EXPECT_NE(parse_error(json).find(text), std::string::npos) << parse_error(json);
  }
}

TEST(Config, ARuleDoesNotRepeatWhatIsAlreadyWrong) {
  EXPECT_EQ(parse_error(R"({"partitions": "4", "default_partition": 3})"),
            "configuration: 1 error\n  partitions: \"4\" is not allowed; expected an integer, at least 1");
  EXPECT_EQ(parse_error(R"({"pipeline_parallel_degree": 0, "default_partition": 3})"),
            "configuration: 1 error\n  pipeline_parallel_degree: 0 is not allowed; expected an integer, at least 1");
}

TEST(Config, EveryCombinationOfShardingAndPrecisionIsValid) {
  EXPECT_NO_THROW(parsed(R"({"partitions": 2, "tensor_parallel_degree": 2, "ddp": true, "bf16": true,
                             "sharded_data_parallel_degree": 4, "shard_optimizer_state": true})"));
  EXPECT_NO_THROW(parsed(R"({"bf16": true})"));
}

TEST(Config, TheEnvironmentReplacesTheDictionaryWhole) {
  const ParsedConfig read = parse_config({R"({"microbatches": 0})", R"({"partitions": 2})", true});
  EXPECT_EQ(read.config, parsed(R"({"partitions": 2})"));
  EXPECT_EQ(parse_config({R"({"microbatches": 8})", "  ", true}).config.microbatches, 8);
  const std::string error = config_error([] { parse_config({"{}", R"({"partitions": 0})", true}); });
  EXPECT_EQ(error.find("configuration (SM_HP_MP_PARAMETERS): 1 error"), 0u) << error;
}

TEST(Config, WhatHasNoEffectBesideTheEnvironmentIsTold) {
  const auto told = [](const std::string& json, const char* environment, const char* own) {
    Sources sources{.input = {.json = json}};
    if (environment != nullptr) sources.input.environment = environment;
    if (own != nullptr) sources.own_environment = own;
    return parse_sources(sources);
  };
  const auto lost = told(R"({"partitions": 2, "ddp": true, "bf16": true})", R"({"partitions": 2})", nullptr);
  ASSERT_EQ(lost.warnings.size(), 1u);
  EXPECT_EQ(
      lost.warnings[0],
      "SM_HP_MP_PARAMETERS is set in the environment, and counts alone: of init() this has no effect: bf16: true, "
      "ddp: true; unset the variable, or say it there");
  EXPECT_EQ(lost.given, std::vector<std::string>{"partitions"});
  EXPECT_TRUE(told(R"({"pipeline_parallel_degree": 2})", R"({"partitions": 2})", nullptr).warnings.empty());
  EXPECT_TRUE(told("{}", R"({"partitions": 2, "ddp": true})", nullptr).warnings.empty());
  const auto both = told(R"({"seed": 1})", R"({"partitions": 2})", R"({"microbatches": 4})");
  EXPECT_EQ(both.config, parsed(R"({"microbatches": 4})"));
  ASSERT_EQ(both.warnings.size(), 2u);
  EXPECT_NE(both.warnings[0].find("of SM_HP_MP_PARAMETERS this has no effect: partitions: 2;"), std::string::npos);
  EXPECT_NE(both.warnings[1].find("of init() this has no effect: seed: 1;"), std::string::npos);
}

TEST(Config, TextThatIsNotJsonIsAnErrorWithItsPosition) {
  EXPECT_EQ(parse_error("{\"partitions\": 2,\n \"a\" 3}").find("configuration is not valid JSON: line 2, column 6"), 0u)
      << parse_error("{\"partitions\": 2,\n \"a\" 3}");
  EXPECT_NE(parse_error("").find("line 1, column 1"), std::string::npos);
  EXPECT_EQ(parse_error(R"({"timeout_s": 1e999})").find("configuration is not valid JSON: "), 0u);
  EXPECT_EQ(parse_error("[1]"), "configuration: [1] is not allowed; expected an object");
}

TEST(Config, ScriptsMaySetUndocumentedKeysForOneWarning) {
  const ParsedConfig read = parse_config({R"({"static_mode": 1, "fast_mode": true, "partitions": 2})", {}, true});
  EXPECT_EQ(read.config, parsed(R"({"partitions": 2})"));
  ASSERT_EQ(read.warnings.size(), 1u);
  EXPECT_NE(read.warnings[0].find("fast_mode, static_mode"), std::string::npos);
}

TEST(Config, WithoutALauncherDegreesBecomeOneBeforeAnythingIsChecked) {
  const ParsedConfig read = parse_config(
      {R"({"partitions": 4, "tensor_parallel_degree": 2, "default_partition": 3, "auto_partition": false})",
       {},
       false});
  EXPECT_EQ(read.config, parsed(R"({"default_partition": 0, "auto_partition": false})"));
  ASSERT_EQ(read.warnings.size(), 1u);
  EXPECT_NE(read.warnings[0].find("partitions: 4, tensor_parallel_degree: 2 became 1"), std::string::npos);
  EXPECT_TRUE(parse_config({"{}", {}, false}).warnings.empty());
  EXPECT_THROW(parse_config({R"({"partitions": 0})", {}, false}), base::ConfigError);
}

TEST(Config, ShardingOfOptimizerStatesBesideThatOfParametersIsRedundantAndSaysSo) {
  const auto json = R"({"ddp": true, "sharded_data_parallel_degree": 2, "shard_optimizer_state": true})";
  const ParsedConfig read = parse_config({json, {}, true});
  ASSERT_EQ(read.warnings.size(), 1u);
  EXPECT_EQ(read.warnings[0].find("shard_optimizer_state is redundant"), 0u);
  EXPECT_NO_THROW(require_available(read.config, 2));
}

TEST(Config, AScheduleForSeveralPartitionsSaysThatItChangesNothingWithOne) {
  const auto warnings = [](const std::string& json, bool several) {
    return parse_config({json, {}, several}).warnings;
  };
  const auto alone = warnings(R"({"schedule": "zero_bubble"})", true);
  ASSERT_EQ(alone.size(), 1u);
  EXPECT_EQ(alone[0].find("schedule: \"zero_bubble\" changes nothing with one partition"), 0u);
  EXPECT_TRUE(warnings(R"({"schedule": "zero_bubble", "partitions": 2})", true).empty());
  EXPECT_TRUE(warnings(R"({"schedule": "interleaved"})", true).empty());
  EXPECT_EQ(warnings(R"({"schedule": "zero_bubble", "partitions": 2})", false).size(), 1u);  // that it is one
}

TEST(Config, AStructFilledByHandIsCheckedLikeText) {
  Config config;
  config.microbatches = 0;
  config.placement_strategy = "DD";
  config.ddp_port = 80;
  EXPECT_EQ(config_error([&] { validate(config); }),
            parse_error(R"({"microbatches": 0, "placement_strategy": "DD", "ddp_port": 80})"));
  EXPECT_NO_THROW(validate(Config{}));
  EXPECT_NO_THROW(validate(with_defaults(Config{})));
}

TEST(Config, ItsJsonReadsBackEqual) {
  for (const char* json : {"{}", R"({"partitions": 2, "seed": 7, "memory_weight": 0.1, "partition_file": "a\"b"})",
                           R"({"ddp": true, "ddp_port": 1, "timeout_s": 2, "sdp_gradient_clipping": 0.1})",
                           R"({"auto_partition": false, "default_partition": 0})",
                           R"({"sdp_gradient_clipping": null, "sdp_units": ["a\"b", "c"]})"}) {
    EXPECT_EQ(parsed(to_json(parsed(json))), parsed(json)) << json;
  }
}

TEST(Config, DifferencesNameTheKeysAndBothValues) {
  EXPECT_EQ(differences(parsed("{}"), parsed("{}")), "");
  EXPECT_EQ(differences(parsed(R"({"partitions": 2})"), parsed(R"({"partitions": 4, "active_microbatches": 5})")),
            "partitions: 2 and 4");
  EXPECT_EQ(differences(parsed(R"({"seed": 1})"), parsed(R"({"ddp": true, "ddp_dist_backend": "nccl"})")),
            "ddp: false and true; ddp_dist_backend: null and \"nccl\"; seed: 1 and null");
}

std::string missing(const std::string& json, int replicas = 1) {
  return config_error([&] { require_available(parsed(json), replicas); });
}

TEST(Available, WhatWorksIsAccepted) {
  for (const char* json :
       {"{}", R"({"partitions": 2, "microbatches": 8, "schedule": "simple", "active_microbatches": 1})",
        R"({"placement_strategy": "spread", "auto_partition": false, "default_partition": 0, "seed": 3})",
        R"({"partitions": 2, "optimize": "speed"})", R"({"partitions": 2, "memory_weight": 0.5})",
        R"({"skip_tracing": true, "timeout_s": 5})", R"({"ddp": true, "partitions": 2})"}) {
    EXPECT_NO_THROW(require_available(parsed(json), 2)) << json;
  }
}

TEST(Available, WhatHasNothingToDoIsAccepted) {
  EXPECT_NO_THROW(require_available(parsed(R"({"sdp_reduce_bucket_size": 1, "activation_loading_horizon": 2})"), 2));
  EXPECT_NO_THROW(require_available(parsed(R"({"ddp": true, "partitions": 2, "shard_optimizer_state": true})"), 1));
  EXPECT_NO_THROW(require_available(parsed(R"({"deterministic_server": true, "memory_weight": 0.5})"), 2));
  EXPECT_NO_THROW(require_available(parsed(R"({"prescaled_batch": true})"), 2));
  EXPECT_NO_THROW(require_available(
      parsed(R"({"partitions": 2, "auto_partition": false, "default_partition": 0, "memory_weight": 0.5})"), 2));
}

TEST(Available, StatesAreSharedOutAmongCopiesWhoseGradientsAreTheSame) {
  EXPECT_NO_THROW(require_available(parsed(R"({"ddp": true, "shard_optimizer_state": true})"), 2));
  EXPECT_NE(missing(R"({"shard_optimizer_state": true})", 2).find("with ddp: true alone"), std::string::npos);
}

TEST(Available, WhatDoesNotExistYetIsAnErrorThatSaysSo) {
  const std::vector<std::pair<std::string, std::string>> absent{
      {"\"schedule\": \"_only_forward\"", "schedule: \"_only_forward\""},
      {"\"contiguous\": false", "contiguous: false"},
      {"\"horovod\": true", "horovod: true"},
      {"\"xla\": true", "xla: true"},
      {"\"fork\": true", "fork: true"},
  };
  for (const auto& [json, text] : absent) {
    const std::string error = missing("{" + json + "}", 2);
    const std::string head = "configuration, valid but not available yet: 1 error\n  ";
    EXPECT_EQ(error.find(base::str(head, text, " is not available yet; ")), 0u) << error;
  }
}

TEST(Available, EverythingMissingIsNamedAtOnce) {
  EXPECT_EQ(missing(R"({"ddp": true, "tensor_parallel_degree": 2, "fork": true, "xla": true})", 2),
            "configuration, valid but not available yet: 2 errors\n"
            "  xla: true is not available yet; leave it at false\n"
            "  fork: true is not available yet; leave it at false");
}

TEST(OfGraphs, KeysOfTensorFlowAskForNothing) {
  const auto json = R"({"partitions": 2, "contiguous": false, "horovod": true, "xla": true, "fork": true})";
  EXPECT_EQ(of_graphs(parsed(json)), parsed(R"({"partitions": 2})"));
  EXPECT_NO_THROW(require_available(of_graphs(parsed(json)), 1));
}

TEST(OfGraphs, KeysOfTorchAreNamedAtOnce) {
  EXPECT_EQ(config_error([] { of_graphs(parsed(R"({"ddp": true, "tensor_parallel_degree": 2, "bf16": true})")); }),
            "configuration of a model of TensorFlow: 3 errors\n"
            "  ddp: true is of models of torch; leave it at false\n"
            "  bf16: true is of models of torch; leave it at false\n"
            "  tensor_parallel_degree: 2 is of models of torch; leave it at 1");
}

}  // namespace
}  // namespace lamina::config
