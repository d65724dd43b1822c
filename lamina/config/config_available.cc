// SPDX-License-Identifier: Apache-2.0
#include <string>

#include "lamina/base/str.h"
#include "lamina/config/config_keys.h"
#include "lamina/config/problems.h"

namespace lamina::config {
namespace {

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

// A line leaves this function when what it names begins to exist.
void require_available(const Config& config, int replicas) {
  const Config complete = with_defaults(config);
  Availability check(complete);
  check.missing(complete.schedule == Schedule::kForwardOnly, "schedule", "use \"simple\" or \"interleaved\"");
  check.missing(&Config::load_partition, "load_partition");
  check.missing(complete.partition_file.has_value(), "partition_file", "leave it out");
  check.missing(&Config::contiguous, "contiguous");
  check.missing(&Config::horovod, "horovod");
  check.missing(complete.tensor_parallel_degree > 1, "tensor_parallel_degree", "leave it at 1");
  check.missing(&Config::fp16, "fp16");
  check.missing(&Config::bf16, "bf16");
  check.missing(&Config::fp16_params, "fp16_params");
  check.missing(complete.shard_optimizer_state && replicas > 1, "shard_optimizer_state", "leave it at false");
  check.missing(&Config::offload_activations, "offload_activations");
  check.missing(complete.sharded_data_parallel_degree > 1, "sharded_data_parallel_degree", "leave it at 1");
  check.missing(&Config::xla, "xla");
  check.missing(&Config::fork, "fork");
  check.raise();
}

}  // namespace lamina::config
