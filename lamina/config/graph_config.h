// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "lamina/config/config.h"

namespace lamina::config {

// Returns the configuration of a job whose model is a graph of operations, as TensorFlow's are. Keys that scripts for
// such models have (`contiguous`, `horovod`, `xla`, `fork`) are at their defaults in it, for they ask for nothing: see
// docs/configuration.md. Throws ConfigError naming the keys of models of torch, and what they are set to.
Config of_graphs(Config config);

}  // namespace lamina::config
