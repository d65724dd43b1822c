// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "lamina/plan/module_tree.h"

namespace lamina::plan {

// A node computes: in the stretches that a trace has seen; without a trace a module without children once, one with
// children and work of its own before and after them.
struct Point {
  int node = 0;
  double forward_us = 0;
  double backward_us = 0;
  std::int64_t value_bytes = 0;  // what the next point needs of it: the outputs of the module that ended last
  std::vector<int> ends;         // modules around it whose calls end with it, the innermost first
};

// A microbatch's way through the model, forward in this order and backward in the opposite one. It begins and ends on
// the rank of partition 0, which runs the step body. What a module passes on that it does not compute itself goes
// straight from producer to consumer; its gradient goes through that module.
struct Route {
  std::vector<Point> points;
  bool timed = true;  // false: the tree has no times, and those here stand for bytes of parameters and activations
};

Route find_route(const ModuleTree& tree);

}  // namespace lamina::plan
