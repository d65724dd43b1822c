// SPDX-License-Identifier: Apache-2.0
#include "lamina/config/config_keys.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <optional>
#include <type_traits>
#include <utility>

#include "lamina/base/edit_distance.h"
#include "lamina/base/str.h"

namespace lamina::config {
namespace {

// The kinds of keys: each function makes the Key of one field of Config. A field that is optional<> takes null too.

template <class T>
struct WithoutOptional {
  using type = T;
};
template <class T>
struct WithoutOptional<std::optional<T>> {
  using type = T;
};

// A key whose JSON type is J. `convert` turns a J into the field's type, or into nothing when it is not allowed;
// `revert` is its inverse.
template <class J, class Field, class Convert, class Revert>
Key key_of(std::string name, std::string allowed, Field Config::* field, Convert convert, Revert revert) {
  constexpr bool optional = !std::is_same_v<Field, typename WithoutOptional<Field>::type>;
  const auto read = [=](Config& config, const Scalar& value) {
    if constexpr (optional) {
      if (std::holds_alternative<std::monostate>(value)) {
        config.*field = std::nullopt;
        return true;
      }
    }
    const J* given = std::get_if<J>(&value);
    const auto converted = given ? convert(*given) : std::nullopt;
    if (converted) config.*field = *converted;
    return converted.has_value();
  };
  const auto write = [=](const Config& config) -> Scalar {
    if constexpr (optional) {
      return config.*field ? Scalar(J(revert(*(config.*field)))) : Scalar();
    } else {
      return J(revert(config.*field));
    }
  };
  return {std::move(name), std::move(allowed), read, write};
}

// Strict: neither true nor 4.0 is an integer.
template <class Field>
Key integer(std::string name, Field Config::* field, std::int64_t low,
            std::int64_t high = std::numeric_limits<typename WithoutOptional<Field>::type>::max()) {
  using T = typename WithoutOptional<Field>::type;
  const std::string allowed = high == std::numeric_limits<T>::max() ? base::str("an integer, at least ", low)
                                                                    : base::str("an integer from ", low, " to ", high);
  const auto convert = [=](std::int64_t x) { return x >= low && x <= high ? std::optional<T>(x) : std::nullopt; };
  return key_of<std::int64_t>(std::move(name), allowed, field, convert, [](T x) { return x; });
}

// An integer is a number too. `holds` must be false for a NaN.
template <class Field>
Key number(std::string name, Field Config::* field, std::string allowed, bool (*holds)(double)) {
  const auto convert = [=](double x) { return holds(x) ? std::optional(x) : std::nullopt; };
  Key key = key_of<double>(std::move(name), std::move(allowed), field, convert, [](double x) { return x; });
  key.read = [strict = key.read](Config& config, const Scalar& value) {
    const auto* whole = std::get_if<std::int64_t>(&value);
    return strict(config, whole ? Scalar(static_cast<double>(*whole)) : value);
  };
  return key;
}

// One of `names`, in the order of the enumeration's values.
template <class Field>
Key choice(std::string name, Field Config::* field, std::vector<std::string> names) {
  using E = typename WithoutOptional<Field>::type;
  std::string allowed = "one of";
  for (const std::string& each : names) allowed += base::str(&each == names.data() ? " " : ", ", show(each));
  const auto convert = [names](const std::string& x) {
    const auto at = std::find(names.begin(), names.end(), x);
    return at == names.end() ? std::nullopt : std::optional(static_cast<E>(at - names.begin()));
  };
  const auto revert = [names](E x) { return names.at(static_cast<std::size_t>(x)); };
  return key_of<std::string>(std::move(name), allowed, field, convert, revert);
}

Key flag(std::string name, bool Config::* field) {
  const auto same = [](bool x) { return std::optional(x); };
  return key_of<bool>(std::move(name), "true or false", field, same, [](bool x) { return x; });
}

Key text(std::string name, std::optional<std::string> Config::* field) {
  const auto same = [](const std::string& x) { return std::optional(x); };
  return key_of<std::string>(std::move(name), "a string", field, same, [](const std::string& x) { return x; });
}

Key text(std::string name, std::string Config::* field) {
  const auto given = [](const std::string& x) { return x.empty() ? std::nullopt : std::optional(x); };
  return key_of<std::string>(std::move(name), "a string that is not empty", field, given,
                             [](const std::string& x) { return x; });
}

Key names(std::string name, std::optional<std::vector<std::string>> Config::* field) {
  using List = std::vector<std::string>;
  const auto same = [](const List& x) { return std::optional(x); };
  return key_of<List>(std::move(name), "a list of strings, or null", field, same, [](const List& x) { return x; });
}

bool is_placement(std::string x) {
  if (x == "cluster" || x == "spread") return true;
  std::sort(x.begin(), x.end());
  return x == "DPT";
}

Key placement(std::string name, std::string Config::* field) {
  const auto convert = [](const std::string& x) { return is_placement(x) ? std::optional(x) : std::nullopt; };
  return key_of<std::string>(std::move(name), "\"cluster\", \"spread\" or the letters D, P and T in any order", field,
                             convert, [](const std::string& x) { return x; });
}

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
// Processes of a busy machine get no turn for tenths of a second.
constexpr double kShortestSilence = 1;

std::vector<Key> make_keys() {
  using C = Config;
  return {
      integer("partitions", &C::partitions, 1),
      integer("microbatches", &C::microbatches, 1),
      choice("schedule", &C::schedule, {"simple", "interleaved", "zero_bubble", "_only_forward"}),
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
      flag("prove_slices", &C::prove_slices),
      flag("fp16", &C::fp16),
      flag("bf16", &C::bf16),
      flag("fp16_params", &C::fp16_params),
      choice("buffer_dtype", &C::buffer_dtype, {"fp32", "fp16", "bf16", "own"}),
      choice("reduce_dtype", &C::reduce_dtype, {"fp32", "fp16", "bf16"}),
      flag("shard_optimizer_state", &C::shard_optimizer_state),
      flag("offload_activations", &C::offload_activations),
      integer("activation_loading_horizon", &C::activation_loading_horizon, 1),
      integer("sharded_data_parallel_degree", &C::sharded_data_parallel_degree, 1),
      integer("sdp_reduce_bucket_size", &C::sdp_reduce_bucket_size, 1),
      integer("sdp_param_persistence_threshold", &C::sdp_param_persistence_threshold, 0),
      integer("sdp_max_live_parameters", &C::sdp_max_live_parameters, 1),
      flag("sdp_reshard_after_forward", &C::sdp_reshard_after_forward),
      flag("sdp_reshard_after_backward", &C::sdp_reshard_after_backward),
      choice("sdp_backward_prefetch", &C::sdp_backward_prefetch, {"pre", "post", "none"}),
      names("sdp_persistent_parameters", &C::sdp_persistent_parameters),
      names("sdp_units", &C::sdp_units),
      flag("sdp_hierarchical_allgather", &C::sdp_hierarchical_allgather),
      number("sdp_gradient_clipping", &C::sdp_gradient_clipping, "a number above 0, or null",
             [](double x) { return x > 0; }),
      flag("xla", &C::xla),
      flag("fork", &C::fork),
      text("device", &C::device),
      number("timeout_s", &C::timeout_s, "a number of seconds, above 0 and at most 1e8",
             [](double x) { return x > 0 && x <= kLongestTimeout; }),
      number("silent_s", &C::silent_s, "a number of seconds, at least 1 and below timeout_s, or null",
             [](double x) { return x >= kShortestSilence && x <= kLongestTimeout; }),
      integer("seed", &C::seed, 0),
      integer("verify_steps", &C::verify_steps, 0),
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
  return std::string(base::nearest(names, name));
}

}  // namespace lamina::config
