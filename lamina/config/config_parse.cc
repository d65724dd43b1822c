// SPDX-License-Identifier: Apache-2.0
#include "lamina/config/config.h"

#include <algorithm>
#include <limits>

#include "lamina/base/str.h"
#include "lamina/config/config_check.h"
#include "lamina/config/config_keys.h"
#include "lamina/config/config_reader.h"

namespace lamina::config {
namespace {

// A process by itself cannot hold more than one part of anything, and scripts written for many should still run in it.
Config for_one_process(Config config, std::vector<std::string>& warnings) {
  std::string reduced;
  const auto reduce = [&](int Config::* degree, std::string_view name) {
    if (config.*degree > 1) reduced += base::str(reduced.empty() ? "" : ", ", name, ": ", config.*degree);
    config.*degree = 1;
  };
  reduce(&Config::partitions, "partitions");
  reduce(&Config::tensor_parallel_degree, "tensor_parallel_degree");
  reduce(&Config::sharded_data_parallel_degree, "sharded_data_parallel_degree");
  if (reduced.empty()) return config;
  // It named one of the partitions that are now a single one.
  if (config.default_partition) config.default_partition = 0;
  warnings.push_back(base::str("this job has one process, so ", reduced,
                               " became 1; start the script with `lamina run -n N` (or torchrun) to use N processes"));
  return config;
}

bool says_anything(const std::optional<std::string>& text) {
  return text && text->find_first_not_of(" \t\r\n") != std::string::npos;
}

}  // namespace

ParsedConfig parse_config(const ConfigInput& input) {
  // The environment replaces the caller's dictionary whole: keys of the two are never mixed.
  const bool from_environment = says_anything(input.environment);
  const std::string source = from_environment ? "configuration (SM_HP_MP_PARAMETERS)" : "configuration";
  Problems problems;
  const ReadConfig read = read_config(from_environment ? *input.environment : input.json, source, problems);

  ParsedConfig parsed{read.config, {}};
  if (!read.tolerated.empty()) {
    parsed.warnings.push_back(
        base::str("these keys are known from existing scripts but have no effect: ", read.tolerated));
  }
  if (!input.several) parsed.config = for_one_process(parsed.config, parsed.warnings);
  check_between_keys(parsed.config, problems);
  problems.raise(source);
  if (!read.enabled) {
    parsed = {Config{}, {"\"enabled\" is false: the parameters beside it were checked but are not used"}};
  }
  parsed.config = with_defaults(parsed.config);
  return parsed;
}

void validate(const Config& config) {
  Problems problems;
  for (const Key& key : config_keys()) {
    Config trial;
    const Scalar value = key.write(config);
    if (!key.read(trial, value)) problems.add(key.name, not_allowed(key.name, show(value), key.allowed));
  }
  check_between_keys(config, problems);
  problems.raise("configuration");
}

Config with_defaults(Config config) {
  if (!config.active_microbatches) config.active_microbatches = default_window(config.partitions);
  if (!config.default_partition) config.default_partition = 0;
  if (!config.memory_weight) config.memory_weight = config.optimize == Optimize::kSpeed ? 0.2 : 0.8;
  if (!config.ddp_dist_backend && config.ddp) config.ddp_dist_backend = DistBackend::kAuto;
  return config;
}

int default_window(int partitions) {
  // In 64 bits: a number of partitions that no machine has must not overflow here.
  const auto window = std::min<std::int64_t>(2 * std::int64_t{partitions} + 1, std::numeric_limits<int>::max());
  return static_cast<int>(window);
}

std::string schedule_name(Schedule schedule) {
  Config config;
  config.schedule = schedule;
  return std::get<std::string>(find_key("schedule")->write(config));
}

std::string differences(const Config& a, const Config& b) {
  std::string text;
  for (const Key& key : config_keys()) {
    const Scalar in_a = key.write(a);
    const Scalar in_b = key.write(b);
    if (in_a != in_b) text += base::str(text.empty() ? "" : "; ", key.name, ": ", show(in_a), " and ", show(in_b));
  }
  return text;
}

std::string to_json(const Config& config) {
  std::string text;
  for (const Key& key : config_keys()) {
    text += base::str(text.empty() ? "{" : ", ", show(key.name), ": ", show(key.write(config)));
  }
  return text + "}";
}

}  // namespace lamina::config
