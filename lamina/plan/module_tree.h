// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "lamina/base/ids.h"

namespace lamina::plan {

// A value that a stretch reads: what an earlier one, of whatever module, has made.
struct Read {
  int at = 0;  // the place of that one
  std::int64_t bytes = 0;

  friend bool operator==(const Read&, const Read&) = default;
};

// The work of a module itself between two calls of others, or an end of its own call; the first one of each of its
// calls is there even if it does nothing.
struct Stretch {
  int at = 0;  // its place among those of all modules, in the order in which they ran
  double forward_us = 0;
  double backward_us = 0;
  std::int64_t value_bytes = 0;  // what it hands on: arguments of the module that is called next, or what it returns
  bool works = false;            // whether it runs an operation, be it a view: then it needs the value
  std::optional<double> weights_us;        // of its backward, what only gradients of parameters need; nothing: unknown
  std::optional<std::vector<Read>> reads;  // each of another stretch; nothing: what the one before it hands on
};

// One module of a tree. Nodes are numbered by their position, parents before children, children in the order in which
// they are called. Costs are per microbatch and without the children's.
struct Node {
  int parent = -1;                           // -1: the root, which is node 0
  std::string name;                          // the path from the root, "transformer.h.5"; the root's may be empty
  std::int64_t parameter_bytes = 0;          // of its own parameters, shared ones too
  std::vector<std::int64_t> parameter_ids;   // of its own parameters; an id in two nodes is a shared parameter
  bool anywhere = false;                     // runs where its argument lies: it holds nothing, and many call it
  std::optional<int> follows;                // of such a one: the module before its first call, see settled()
  bool callable = true;                      // false: a container that is never called, such as a list of modules
  std::optional<base::Partition> placed_at;  // by hand; nothing under it is then moved unless placed itself
  double forward_us = 0;
  double backward_us = 0;
  std::int64_t activation_bytes = 0;  // kept from its forward to its backward
  std::int64_t output_bytes = 0;
  std::vector<Stretch> stretches;  // of its times, where a trace has seen them
  std::vector<int> together;       // nodes that have to be owned with it for another reason than shared parameters
};

using ModuleTree = std::vector<Node>;
using Assignment = std::vector<base::Partition>;  // one per node

}  // namespace lamina::plan
