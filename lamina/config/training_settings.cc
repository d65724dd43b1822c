// SPDX-License-Identifier: Apache-2.0
#include "lamina/config/training_settings.h"

#include <algorithm>
#include <array>
#include <initializer_list>

#include "lamina/base/error.h"
#include "lamina/base/str.h"

namespace lamina::config {
namespace {

constexpr std::string_view kDegree = "sharded_data_parallel_degree";

bool shards(std::string_view layout) {
  return layout == "FULL_SHARD" || layout == "SHARD_GRAD_OP" || layout == "stage 3" || layout == "stage 2";
}

// The keys that a layout needs.
InitKeys keys_of_layout(std::string_view layout) {
  if (shards(layout)) {
    return {{"sdp_reshard_after_forward", layout == "FULL_SHARD" || layout == "stage 3"},
            {"sdp_reshard_after_backward", layout != "stage 2"}};
  }
  return {{std::string(kDegree), std::int64_t{1}}, {"shard_optimizer_state", layout == "stage 1"}};
}

// The values of one of these keys, as a number where it is one or true or false.
std::optional<double> number_or_flag(const Scalar& value) {
  if (const auto* flag = std::get_if<bool>(&value)) return *flag ? 1 : 0;
  if (const auto* whole = std::get_if<std::int64_t>(&value)) return static_cast<double>(*whole);
  const auto* number = std::get_if<double>(&value);
  return number == nullptr ? std::nullopt : std::optional(*number);
}

bool are_equal(const Scalar& a, const Scalar& b) {
  const auto number = number_or_flag(a);
  return number ? number == number_or_flag(b) : a == b;
}

// The ranks of a job, as the keys of init divide them.
struct Division {
  int holders = 1;  // ranks among which a parameter may be sharded
  int readers = 1;  // loaders that read different data
};

Division divided(int ranks, const UserValue& own) {
  const auto degree = [&](std::initializer_list<std::string_view> names) {
    for (const auto name : names) {
      const auto* found = own.find(name);
      const auto* count = found == nullptr ? nullptr : std::get_if<std::int64_t>(&found->value);
      if (count != nullptr && *count >= 1 && *count <= ranks) return static_cast<int>(*count);
    }
    return 1;
  };
  const int copies = ranks / degree({"partitions", "pipeline_parallel_degree"});
  const int holders = copies / degree({"tensor_parallel_degree"});
  const auto* prescaled = own.find("prescaled_batch");
  return {holders, prescaled != nullptr && prescaled->value == Scalar(true) ? holders : copies};
}

// Completes what a configuration says, beside keys of init that do not contradict it.
void settle_keys(TrainingSettings& wanted, const UserValue& own, int holders, Findings& findings) {
  InitKeys needed{{"ddp", true}};
  const auto add = [&](const InitKeys& keys) { needed.insert(needed.end(), keys.begin(), keys.end()); };
  add(keys_of_layout(wanted.layout));
  add(wanted.keys);
  wanted.keys = std::move(needed);
  const auto notation = findings.notation;
  for (const auto& [key, value] : wanted.keys) {
    const auto* given = own.find(key);
    if (given == nullptr || are_equal(given->value, value)) continue;
    findings.problems.add(
        key, base::str(in_section("lamina_config", key, notation), ": ", given->shown, ", but ", wanted.layout,
                       " with precision ", name_of(wanted.precision), " makes it ", show(value, notation)));
  }
  if (!shards(wanted.layout)) return;
  const InitKeys defaults{{std::string(kDegree), std::int64_t{holders}},
                          {"sdp_param_persistence_threshold", std::int64_t{0}},
                          {"sdp_gradient_clipping", Scalar()}};
  for (const auto& each : defaults) {
    const bool is_needed = std::ranges::count(wanted.keys, each.first, &InitKeys::value_type::first) > 0;
    if (!is_needed && own.find(each.first) == nullptr) wanted.keys.push_back(each);
  }
  const auto* degree = own.find(kDegree);
  if (holders > 1 && degree != nullptr && are_equal(degree->value, std::int64_t{1})) {
    findings.problems.add(kDegree, base::str(in_section("lamina_config", kDegree, notation), ": 1, but ", wanted.layout,
                                             " shards over more of the ", holders, " copies of the model"));
  }
}

// True where keys make the model half.
bool is_half(const TrainingSettings& settings, const UserValue& own) {
  return std::ranges::any_of(std::array{"fp16", "bf16"}, [&](std::string_view name) {
    const auto found = std::ranges::find(settings.keys, name, &InitKeys::value_type::first);
    if (found != settings.keys.end()) return found->second == Scalar(true);
    const auto* given = own.find(name);
    return given != nullptr && given->value == Scalar(true);
  });
}

}  // namespace

TrainingSettings training_settings(const TrainingArguments& given) {
  Findings findings{given.notation};
  static const UserValue empty{Unreadable{}, "", std::vector<UserEntry>()};
  const UserValue& own = given.own && given.own->entries ? *given.own : empty;
  if (given.own && !given.own->entries) read_table("lamina_config", *given.own, {}, findings);
  const auto [holders, readers] = divided(given.ranks, own);
  auto precision = Precision::kFp32;
  std::optional<Precision> argument;
  try {
    precision = read_precision(given.precision, given.device_type);
    if (!std::holds_alternative<std::monostate>(given.precision.value)) argument = precision;
  } catch (const base::ConfigError& error) {
    findings.problems.add("precision", error.what());
  }
  TrainingSettings wanted{.precision = precision, .autocast = precision, .optimizer_scale = ScaleOptions()};
  if (given.fsdp_config) wanted = read_fsdp(*given.fsdp_config, precision, findings);
  if (given.deepspeed_config) {
    wanted = read_deepspeed(given, argument, readers, findings);
    if (given.fsdp_config) {
      findings.problems.add("fsdp_config", "fsdp_config and deepspeed_config are both given; expected one of them");
    }
  }
  if (!wanted.layout.empty()) settle_keys(wanted, own, holders, findings);
  findings.problems.raise("configuration of the Trainer");
  const bool scales = wanted.precision == Precision::kAmpFp16, half = is_half(wanted, own);
  wanted.scales_losses = scales && !half;
  if (!scales || !half) wanted.optimizer_scale.reset();
  wanted.without_effect = std::move(findings.without_effect);
  return wanted;
}

}  // namespace lamina::config
