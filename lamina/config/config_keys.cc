// SPDX-License-Identifier: Apache-2.0
#include "lamina/config/config_keys.h"

#include <algorithm>
#include <array>
#include <utility>

#include "lamina/base/edit_distance.h"
#include "lamina/config/config_kinds.h"

namespace lamina::config {
namespace {

constexpr std::array<std::pair<std::string_view, std::string_view>, 2> kAliases{{
    {"pipeline", "schedule"},
    {"pipeline_parallel_degree", "partitions"},
}};

constexpr std::array<std::string_view, 7> kTolerated{
    "_fp32_grad_accumulation",
    "_match_weights",
    "checkpoint_attentions",
    "delayed_parameter_initialization",
    "fast_mode",
    "static_mode",
    "trace_device",
};

// No timer of ours overflows below it; about three years.
constexpr double kLongestTimeout = 1e8;

std::vector<Key> make_keys() {
  using C = Config;
  return {
      integer("partitions", &C::partitions, 1),
      integer("microbatches", &C::microbatches, 1),
      choice("schedule", &C::schedule, {"simple", "interleaved", "_only_forward"}),
      integer("active_microbatches", &C::active_microbatches, 1),
      flag("deterministic_server", &C::deterministic_server),
      placement("placement_strategy", &C::placement_strategy),
      flag("auto_partition", &C::auto_partition),
      integer("default_partition", &C::default_partition, 0),
      choice("optimize", &C::optimize, {"memory", "speed"}),
      number("memory_weight", &C::memory_weight, "a number from 0 to 1", [](double x) { return x >= 0 && x <= 1; }),
      flag("skip_tracing", &C::skip_tracing),
      flag("load_partition", &C::load_partition),
      text("partition_file", &C::partition_file),
      flag("contiguous", &C::contiguous),
      flag("ddp", &C::ddp),
      integer("ddp_port", &C::ddp_port, 0, 65535),
      choice("ddp_dist_backend", &C::ddp_dist_backend, {"auto", "nccl"}),
      flag("horovod", &C::horovod),
      integer("tensor_parallel_degree", &C::tensor_parallel_degree, 1),
      flag("prescaled_batch", &C::prescaled_batch),
      flag("fp16", &C::fp16),
      flag("bf16", &C::bf16),
      flag("fp16_params", &C::fp16_params),
      flag("shard_optimizer_state", &C::shard_optimizer_state),
      flag("offload_activations", &C::offload_activations),
      integer("activation_loading_horizon", &C::activation_loading_horizon, 1),
      integer("sharded_data_parallel_degree", &C::sharded_data_parallel_degree, 1),
      integer("sdp_reduce_bucket_size", &C::sdp_reduce_bucket_size, 1),
      integer("sdp_param_persistence_threshold", &C::sdp_param_persistence_threshold, 0),
      integer("sdp_max_live_parameters", &C::sdp_max_live_parameters, 1),
      flag("sdp_hierarchical_allgather", &C::sdp_hierarchical_allgather),
      number("sdp_gradient_clipping", &C::sdp_gradient_clipping, "a number above 0", [](double x) { return x > 0; }),
      flag("xla", &C::xla),
      flag("fork", &C::fork),
      number("timeout_s", &C::timeout_s, "a number of seconds, above 0 and at most 1e8",
             [](double x) { return x > 0 && x <= kLongestTimeout; }),
      integer("seed", &C::seed, 0),
  };
}

std::vector<std::string_view> all_names() {
  std::vector<std::string_view> names(kTolerated.begin(), kTolerated.end());
  for (const Key& key : config_keys()) names.push_back(key.name);
  for (const auto& [alias, name] : kAliases) names.push_back(alias);
  std::sort(names.begin(), names.end());
  return names;
}

}  // namespace

const std::vector<Key>& config_keys() {
  static const std::vector<Key> keys = make_keys();
  return keys;
}

std::string_view canonical_name(std::string_view name) {
  for (const auto& [alias, canonical] : kAliases) {
    if (name == alias) return canonical;
  }
  return name;
}

const Key* find_key(std::string_view name) {
  for (const Key& key : config_keys()) {
    if (key.name == name) return &key;
  }
  return nullptr;
}

bool is_tolerated(std::string_view name) {
  return std::find(kTolerated.begin(), kTolerated.end(), name) != kTolerated.end();
}

std::string nearest_name(std::string_view name) {
  const auto names = all_names();
  const auto nearer = [name](std::string_view a, std::string_view b) {
    return base::edit_distance(name, a) < base::edit_distance(name, b);
  };
  return std::string(*std::min_element(names.begin(), names.end(), nearer));
}

}  // namespace lamina::config
