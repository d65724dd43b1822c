// SPDX-License-Identifier: Apache-2.0
#include "lamina/config/config.h"

#include <algorithm>
#include <limits>

#include "lamina/base/error.h"
#include "lamina/base/str.h"
#include "lamina/config/config_keys.h"
#include "lamina/config/config_reader.h"
#include "lamina/config/problems.h"
#include "lamina/config/scalar.h"
#include "lamina/config/sources.h"

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

// A text that may be the configuration, and who says it.
struct Source {
  std::string name;
  std::string json;
};

// The sources that say anything, that which counts first.
std::vector<Source> in_order(const Sources& given) {
  std::vector<Source> sources;
  if (says_anything(given.own_environment)) sources.push_back({kOwnVariable, *given.own_environment});
  if (says_anything(given.input.environment)) sources.push_back({kSageMakerVariable, *given.input.environment});
  sources.push_back({"init()", given.input.json});
  return sources;
}

// Lists the keys that `other` says in vain, as "ddp: true, bf16: true"; "" where `counts` says the same.
std::string without_effect(const Source& other, const ReadConfig& counts) {
  Problems ignored;  // what does not count need not be right
  std::string lines;
  try {
    const ReadConfig read = read_config(other.json, other.name, ignored);
    for (const auto& name : read.given) {
      const Key& key = *find_key(name);
      const Scalar value = key.write(read.config);
      if (read.enabled && value != key.write(counts.config)) {
        lines += base::str(lines.empty() ? "" : ", ", name, ": ", show(value));
      }
    }
  } catch (const base::ConfigError&) {
    return "what it says, which is no JSON object";
  }
  return lines;
}

void tell_what_has_no_effect(const std::vector<Source>& sources, const ReadConfig& counts,
                             std::vector<std::string>& warnings) {
  for (std::size_t i = 1; i < sources.size(); ++i) {
    const std::string lost = without_effect(sources[i], counts);
    if (lost.empty()) continue;
    warnings.push_back(base::str(sources[0].name, " is set in the environment, and counts alone: of ", sources[i].name,
                                 " this has no effect: ", lost, "; unset the variable, or say it there"));
  }
}

void check_default_partition(const Config& config, Problems& problems) {
  if (problems.concern("default_partition") || problems.concern("partitions")) return;
  if (!config.auto_partition && !config.default_partition && !problems.concern("auto_partition")) {
    problems.add(
        "default_partition",
        base::str("default_partition: null is not allowed when auto_partition is false; expected the partition, from "
                  "0 to ",
                  config.partitions - 1, ", of modules without one of their own"));
  }
  if (config.default_partition.value_or(0) >= config.partitions) {
    problems.add("default_partition", base::str("default_partition: ", *config.default_partition,
                                                " is not allowed with partitions: ", config.partitions,
                                                "; expected an integer from 0 to ", config.partitions - 1));
  }
}

void check_needs_ddp(const Config& config, std::string_view key, bool given, Problems& problems) {
  if (!given || config.ddp || problems.concern(key) || problems.concern("ddp")) return;
  const std::string value = show(find_key(key)->write(config));
  problems.add(key, base::str(key, ": ", value, " needs ddp: true; set it, or leave ", key, " out"));
}

void check_exclusive(const Config& config, bool Config::* a, bool Config::* b, std::string_view a_name,
                     std::string_view b_name, Problems& problems) {
  if (!(config.*a && config.*b)) return;
  problems.add(a_name,
               base::str(a_name, ": true is not allowed together with ", b_name, ": true; expected one of them"));
}

// Adds what the rules between keys find. A rule is left out when one of its keys already has a problem.
void check_between_keys(const Config& config, Problems& problems) {
  check_default_partition(config, problems);
  check_needs_ddp(config, "tensor_parallel_degree", config.tensor_parallel_degree > 1, problems);
  check_needs_ddp(config, "sharded_data_parallel_degree", config.sharded_data_parallel_degree > 1, problems);
  check_needs_ddp(config, "ddp_port", config.ddp_port.has_value(), problems);
  check_needs_ddp(config, "ddp_dist_backend", config.ddp_dist_backend.has_value(), problems);
  check_needs_ddp(config, "reduce_dtype", config.reduce_dtype.has_value(), problems);
  if (config.load_partition && !config.partition_file) {
    problems.add("load_partition",
                 "load_partition: true needs partition_file, which it reads; name it, or leave "
                 "load_partition out");
  }
  if (config.sdp_reshard_after_forward && !config.sdp_reshard_after_backward) {
    problems.add("sdp_reshard_after_backward",
                 "sdp_reshard_after_backward: false needs sdp_reshard_after_forward: false, for what stays after "
                 "backwards stays after forwards; set it, or leave sdp_reshard_after_backward out");
  }
  if (config.silent_s && *config.silent_s >= config.timeout_s && !problems.concern("silent_s") &&
      !problems.concern("timeout_s")) {
    problems.add("silent_s", base::str("silent_s: ", *config.silent_s, " is not allowed with timeout_s: ",
                                       config.timeout_s, ", at which ranks that wait end; expected less"));
  }
  check_exclusive(config, &Config::ddp, &Config::horovod, "ddp", "horovod", problems);
  check_exclusive(config, &Config::fp16, &Config::bf16, "fp16", "bf16", problems);
}

// Collects the values that ask for what does not exist yet.
class Availability {
 public:
  explicit Availability(const Config& config) : config_(config) {}

  // The value of `key` asks for something that does not exist yet; `instead` says what to do meanwhile.
  void missing(bool asked, std::string_view key, std::string_view instead) {
    if (!asked) return;
    problems_.add(key, base::str(key, ": ", show(find_key(key)->write(config_)), " is not available yet; ", instead));
  }

  // A switch that has to stay as it is by default.
  void missing(bool Config::* field, std::string_view key) {
    const bool off = Config{}.*field;
    missing(config_.*field != off, key, off ? "leave it at true" : "leave it at false");
  }

  void raise() const { problems_.raise("configuration, valid but not available yet"); }

 private:
  const Config& config_;
  Problems problems_;
};

}  // namespace

ParsedConfig parse_config(const ConfigInput& input) { return parse_sources({input, {}}); }

GivenConfig parse_sources(const Sources& given) {
  const auto sources = in_order(given);
  const std::string source = sources.size() > 1 ? base::str("configuration (", sources[0].name, ")") : "configuration";
  Problems problems;
  const ReadConfig read = read_config(sources[0].json, source, problems);

  GivenConfig parsed{{read.config, {}}, read.given};
  tell_what_has_no_effect(sources, read, parsed.warnings);
  if (!read.tolerated.empty()) {
    parsed.warnings.push_back(
        base::str("these keys are known from existing scripts but have no effect: ", read.tolerated));
  }
  if (!given.input.several) parsed.config = for_one_process(parsed.config, parsed.warnings);
  check_between_keys(parsed.config, problems);
  problems.raise(source);
  if (parsed.config.shard_optimizer_state && parsed.config.sharded_data_parallel_degree > 1) {
    parsed.warnings.push_back(
        "shard_optimizer_state is redundant: with sharded_data_parallel_degree the states of optimizers are sharded "
        "with their parameters");
  }
  if (parsed.config.schedule == Schedule::kZeroBubble && read.config.partitions == 1) {
    parsed.warnings.push_back(
        "schedule: \"zero_bubble\" changes nothing with one partition: it fills the time in which ranks of a pipeline "
        "wait for each other");
  }
  if (!read.enabled) {
    parsed = {{Config{}, {"\"enabled\" is false: the parameters beside it were checked but are not used"}}, {}};
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

std::optional<double> silence_of(const Config& config, bool outlives) {
  if (config.silent_s || !outlives) return config.silent_s;
  return std::min(30.0, config.timeout_s / 2);
}

Config collapsed(Config config) {
  config.partitions = 1;
  config.tensor_parallel_degree = 1;
  config.sharded_data_parallel_degree = 1;
  config.shard_optimizer_state = false;
  if (config.default_partition) config.default_partition = 0;
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

// A line leaves this function when what it names begins to exist.
void require_available(const Config& config, int replicas) {
  const Config complete = with_defaults(config);
  Availability check(complete);
  check.missing(complete.schedule == Schedule::kForwardOnly, "schedule", "use \"simple\" or \"interleaved\"");
  check.missing(&Config::contiguous, "contiguous");
  check.missing(&Config::horovod, "horovod");
  if (complete.tensor_parallel_degree > 1) {
    check.missing(!complete.prescaled_batch && complete.sharded_data_parallel_degree > 1, "prescaled_batch",
                  "with tensor_parallel_degree and sharding it is to be true");
  }
  check.missing(&Config::xla, "xla");
  check.missing(&Config::fork, "fork");
  check.raise();
  if (complete.shard_optimizer_state && replicas > 1 && !complete.ddp) {
    throw base::ConfigError(
        "shard_optimizer_state shares states out among the copies of the model, whose gradients "
        "are the same with ddp: true alone");
  }
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
