// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "lamina/plan/module_tree.h"

namespace lamina::plan {

// A value that a point needs, and the point that makes it.
struct RouteSource {
  int point = 0;
  std::int64_t bytes = 0;
};

// A node computes: in the stretches that a trace has seen; without a trace a module without children once, one with
// children and work of its own before and after them.
struct Point {
  int node = 0;
  double forward_us = 0;
  double backward_us = 0;
  std::int64_t value_bytes = 0;           // what it hands on: the outputs of the module that ended last
  std::optional<double> weights_us = {};  // the weight part of its backward; nothing: unknown
  int call = 0;                           // of the node, among those of the route
  std::vector<RouteSource> reads = {};    // of earlier points
};

// A call of a node, made in the call of another one.
struct RouteCall {
  int node = 0;
  int caller = -1;  // the place of that call; -1: the step body's, of the root
};

// A microbatch's way through the model, forward in this order and backward in the opposite one. It begins and ends on
// the rank of partition 0, which runs the step body. What a module passes on that it does not compute itself goes
// straight from producer to consumer; its gradient goes through that module.
struct Route {
  std::vector<Point> points;
  std::vector<RouteCall> calls;      // callers before those that they call; the first is the root's
  std::vector<RouteSource> results;  // what the step body reads: the last point's, and whatever no point reads
  bool timed = true;  // false: the tree has no times, and those here stand for bytes of parameters and activations
};

Route find_route(const ModuleTree& tree);

}  // namespace lamina::plan
