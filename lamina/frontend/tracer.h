// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "lamina/frontend/module_tree.h"
#include "lamina/model/plan.h"
#include "lamina/value/value.h"

// Costs of the modules of a torch::nn model, found out by running it.
namespace lamina::frontend {

// A call of the model.
struct Example {
  std::int64_t kind = 0;  // see [Note: call kinds]
  value::Value arguments;
};

// Runs the model on copies of the example's arguments, a few times and without gradients, in this thread; the shortest
// forward of each module counts, and its backward for twice that. Where an operation has a parameter as a factor, one
// half of that is for the parameter. Buffers and random numbers are left as they were.
// Throws what the model throws.
std::vector<model::Cost> trace(const TorchModuleTree& tree, const Example& example);

}  // namespace lamina::frontend
