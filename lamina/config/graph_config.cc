// SPDX-License-Identifier: Apache-2.0
#include "lamina/config/graph_config.h"

#include <array>
#include <string_view>

#include "lamina/base/str.h"
#include "lamina/config/config_keys.h"
#include "lamina/config/problems.h"
#include "lamina/config/scalar.h"

namespace lamina::config {
namespace {

// Keys of copies, slices, shards, precision and proofs of modules.
constexpr std::array<std::string_view, 13> kOfModules{"ddp",
                                                      "ddp_port",
                                                      "reduce_dtype",
                                                      "buffer_dtype",
                                                      "fp16",
                                                      "bf16",
                                                      "fp16_params",
                                                      "seed",
                                                      "verify_steps",
                                                      "tensor_parallel_degree",
                                                      "sharded_data_parallel_degree",
                                                      "shard_optimizer_state",
                                                      "offload_activations"};

}  // namespace

Config of_graphs(Config config) {
  const Config plain = with_defaults({});
  Problems problems;
  for (const std::string_view name : kOfModules) {
    const Key& key = *find_key(name);
    const Scalar value = key.write(config);
    if (value == key.write(plain)) continue;
    problems.add(name,
                 base::str(name, ": ", show(value), " is of models of torch; leave it at ", show(key.write(plain))));
  }
  problems.raise("configuration of a model of TensorFlow");
  config.contiguous = plain.contiguous;
  config.horovod = plain.horovod;
  config.xla = plain.xla;
  config.fork = plain.fork;
  return config;
}

}  // namespace lamina::config
