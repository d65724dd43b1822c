// SPDX-License-Identifier: Apache-2.0
#include "lamina/base/str.h"
#include "tests/config/config_fixture.h"

namespace lamina::config {
namespace {

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

TEST(Available, WhatDoesNotExistYetIsAnErrorThatSaysSo) {
  const std::vector<std::pair<std::string, std::string>> absent{
      {"\"schedule\": \"_only_forward\"", "schedule: \"_only_forward\""},
      {"\"load_partition\": true", "load_partition: true"},
      {"\"partition_file\": \"a\"", "partition_file: \"a\""},
      {"\"contiguous\": false", "contiguous: false"},
      {"\"horovod\": true", "horovod: true"},
      {"\"fp16\": true", "fp16: true"},
      {"\"bf16\": true", "bf16: true"},
      {"\"fp16_params\": true", "fp16_params: true"},
      {"\"shard_optimizer_state\": true", "shard_optimizer_state: true"},
      {"\"offload_activations\": true", "offload_activations: true"},
      {"\"sharded_data_parallel_degree\": 2", "sharded_data_parallel_degree: 2"},
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
  EXPECT_EQ(missing(R"({"ddp": true, "tensor_parallel_degree": 2, "fp16": true})", 2),
            "configuration, valid but not available yet: 2 errors\n"
            "  tensor_parallel_degree: 2 is not available yet; leave it at 1\n"
            "  fp16: true is not available yet; leave it at false");
}

}  // namespace
}  // namespace lamina::config
