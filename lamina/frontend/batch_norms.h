// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "lamina/runtime/running_statistics.h"

namespace torch::nn {
class Module;
}

namespace lamina::frontend {

// The BatchNorms in and under `root` that keep running statistics, a Child or not.
std::vector<runtime::BatchNorm> batch_norms(const torch::nn::Module& root);

}  // namespace lamina::frontend
