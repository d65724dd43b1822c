// SPDX-License-Identifier: Apache-2.0
#include "lamina/config/config_check.h"

#include <string>

#include "lamina/base/str.h"
#include "lamina/config/config_keys.h"

namespace lamina::config {
namespace {

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

}  // namespace

void check_between_keys(const Config& config, Problems& problems) {
  check_default_partition(config, problems);
  check_needs_ddp(config, "tensor_parallel_degree", config.tensor_parallel_degree > 1, problems);
  check_needs_ddp(config, "ddp_port", config.ddp_port.has_value(), problems);
  check_needs_ddp(config, "ddp_dist_backend", config.ddp_dist_backend.has_value(), problems);
  check_exclusive(config, &Config::ddp, &Config::horovod, "ddp", "horovod", problems);
  check_exclusive(config, &Config::fp16, &Config::bf16, "fp16", "bf16", problems);
}

}  // namespace lamina::config
