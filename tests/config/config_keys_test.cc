// SPDX-License-Identifier: Apache-2.0
#include "lamina/config/config_keys.h"

#include <map>
#include <set>

#include "lamina/base/str.h"
#include "tests/config/config_fixture.h"

namespace lamina::config {
namespace {

struct Case {
  std::vector<std::string> good;
  std::vector<std::string> bad;
  std::string needs;  // other parameters without which the good values break a rule
};

const Case kFlag{{"true", "false"}, {"0", "1", "\"true\"", "null", "[]"}, ""};

Case counter(std::string needs = "") {
  return {{"1", "2", "2147483647"},
          {"0", "-1", "4.0", "true", "\"4\"", "null", "[2]", "{}", "2147483648", "18446744073709551615"},
          needs};
}

Case size(std::vector<std::string> good, std::vector<std::string> bad) {
  for (const char* wrong : {"-1", "5e8", "true", "null", "9223372036854775808"}) bad.emplace_back(wrong);
  good.emplace_back("9223372036854775807");
  return {good, bad, ""};
}

std::map<std::string, Case> cases() {
  std::map<std::string, Case> all{
      {"partitions", counter()},
      {"pipeline_parallel_degree", counter()},
      {"microbatches", counter()},
      {"schedule",
       {{"\"simple\"", "\"interleaved\"", "\"zero_bubble\"", "\"_only_forward\""},
        {"\"Simple\"", "\"\"", "1", "null"},
        ""}},
      {"pipeline", {{"\"simple\"", "\"interleaved\""}, {"\"gpipe\"", "true"}, ""}},
      {"active_microbatches", {{"1", "7", "null"}, {"0", "1.0", "true", "\"1\""}, ""}},
      {"placement_strategy",
       {{"\"cluster\"", "\"spread\"", "\"DPT\"", "\"DTP\"", "\"PDT\"", "\"PTD\"", "\"TDP\"", "\"TPD\""},
        {"\"\"", "\"dpt\"", "\"DP\"", "\"DDP\"", "\"DPTD\"", "1", "null"},
        ""}},
      {"default_partition", {{"0", "3", "null"}, {"-1", "1.0", "false", "\"0\""}, "\"partitions\": 4"}},
      {"optimize", {{"\"memory\"", "\"speed\""}, {"\"time\"", "0"}, ""}},
      {"memory_weight", {{"0", "1", "0.0", "0.35", "1.0", "null"}, {"-0.1", "1.1", "2", "true", "\"0.5\""}, ""}},
      {"partition_file", {{"\"a.json\"", "null"}, {"1", "true"}, ""}},
      {"ddp_port", {{"0", "65535", "null"}, {"-1", "65536", "1.5", "true", "\"80\""}, "\"ddp\": true"}},
      {"ddp_dist_backend", {{"\"auto\"", "\"nccl\"", "null"}, {"\"gloo\"", "1"}, "\"ddp\": true"}},
      {"buffer_dtype", {{"\"fp32\"", "\"fp16\"", "\"bf16\"", "\"own\"", "null"}, {"\"float32\"", "\"\"", "32"}, ""}},
      {"reduce_dtype",
       {{"\"fp32\"", "\"fp16\"", "\"bf16\"", "null"}, {"\"own\"", "\"float32\"", "true"}, "\"ddp\": true"}},
      {"tensor_parallel_degree", counter("\"ddp\": true")},
      {"activation_loading_horizon", counter()},
      {"sharded_data_parallel_degree", counter("\"ddp\": true")},
      {"sdp_reduce_bucket_size", size({"1"}, {"0"})},
      {"sdp_param_persistence_threshold", size({"0"}, {})},
      {"sdp_max_live_parameters", size({"1"}, {"0"})},
      {"sdp_backward_prefetch", {{"\"pre\"", "\"post\"", "\"none\""}, {"\"PRE\"", "\"\"", "true", "null"}, ""}},
      {"sdp_gradient_clipping", {{"1", "0.001", "1e10", "null"}, {"0", "0.0", "-1", "true", "\"1\""}, ""}},
      {"sdp_persistent_parameters", {{"[]", "[\"a\", \"a.b\"]", "null"}, {"\"a\"", "[1]", "{}", "true"}, ""}},
      {"sdp_units", {{"[]", "[\"a\"]", "[\"a\", \"a.b\"]", "null"}, {"\"a\"", "[1]", "[null]", "{}", "true"}, ""}},
      {"device", {{"\"auto\"", "\"cpu\"", "\"cuda:1\""}, {"1", "true", "[\"cpu\"]"}, ""}},
      {"timeout_s", {{"1", "0.5", "1e8"}, {"0", "-1.0", "1.1e8", "true", "null"}, ""}},
      {"silent_s", {{"1", "30.5", "null"}, {"0", "0.9", "-1", "1.1e8", "true", "\"30\""}, ""}},
      {"verify_steps", {{"0", "1", "3"}, {"-1", "0.5", "true", "\"1\"", "null"}, ""}},
      {"seed", {{"0", "9223372036854775807", "null"}, {"-1", "0.0", "true", "\"0\""}, ""}},
  };
  for (const char* name : {"deterministic_server", "auto_partition", "skip_tracing", "load_partition", "contiguous",
                           "ddp", "horovod", "prescaled_batch", "prove_slices", "fp16", "bf16", "fp16_params",
                           "shard_optimizer_state", "offload_activations", "sdp_hierarchical_allgather",
                           "sdp_reshard_after_forward", "sdp_reshard_after_backward", "xla", "fork"}) {
    all.emplace(name, kFlag);
  }
  all["sdp_reshard_after_backward"].needs = "\"sdp_reshard_after_forward\": false";
  all["auto_partition"].needs = "\"default_partition\": 0";
  all["load_partition"].needs = "\"partition_file\": \"a.json\"";
  return all;
}

std::string object(const std::string& name, const std::string& value, const std::string& more = "") {
  return base::str("{\"", name, "\": ", value, more.empty() ? "" : ", ", more, "}");
}

TEST(ConfigKeys, EveryKeyHasItsCases) {
  std::set<std::string> tested;
  for (const auto& [name, unused] : cases()) tested.emplace(canonical_name(name));
  for (const Key& key : config_keys()) EXPECT_TRUE(tested.contains(key.name)) << key.name;
}

TEST(ConfigKeys, EveryAllowedValueIsRead) {
  for (const auto& [name, one] : cases()) {
    for (const std::string& value : one.good) {
      EXPECT_NO_THROW(parsed(object(name, value, one.needs))) << name << ": " << value;
    }
  }
}

TEST(ConfigKeys, EveryOtherValueIsAnErrorWithKeyValueAndWhatIsAllowed) {
  for (const auto& [name, one] : cases()) {
    for (const std::string& value : one.bad) {
      const std::string error = parse_error(object(name, value));
      const std::string allowed = find_key(canonical_name(name))->allowed;
      const std::string line = base::str("configuration: 1 error\n  ", name, ": ");
      EXPECT_EQ(error.find(line), 0u) << error;
      EXPECT_NE(error.find(" is not allowed; expected " + allowed), std::string::npos) << error;
      if (value.find("e8") == std::string::npos) {
        EXPECT_NE(error.find(base::str(name, ": ", value, " ")), std::string::npos) << error;
      }
    }
  }
}

TEST(ConfigKeys, AValueOfOneKeyChangesOnlyThatField) {
  for (const auto& [name, one] : cases()) {
    const Key& key = *find_key(canonical_name(name));
    for (const std::string& value : one.good) {
      Config changed = parsed(object(name, value, one.needs));
      const Config usual = one.needs.empty() ? parsed("{}") : parsed("{" + one.needs + "}");
      key.read(changed, key.write(usual));
      // These follow from others by themselves.
      changed.active_microbatches = usual.active_microbatches;
      changed.memory_weight = usual.memory_weight;
      changed.ddp_dist_backend = usual.ddp_dist_backend;
      EXPECT_EQ(differences(changed, usual), "") << name << ": " << value;
    }
  }
}

TEST(ConfigKeys, AnUnknownKeyComesWithTheNearestKnownName) {
  const std::map<std::string, std::string> typos{{"microbatch", "microbatches"},
                                                 {"partition", "partitions"},
                                                 {"pipeline_parallel_degre", "pipeline_parallel_degree"},
                                                 {"Schedule", "schedule"},
                                                 {"timeout", "timeout_s"},
                                                 {"fp61", "fp16"}};
  for (const auto& [typo, name] : typos) {
    EXPECT_EQ(parse_error(object(typo, "1")),
              base::str("configuration: 1 error\n  ", typo, ": 1 is not allowed, there is no such key; the nearest is ",
                        name));
  }
}

}  // namespace
}  // namespace lamina::config
