// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "lamina/plan/goal.h"
#include "lamina/plan/module_tree.h"

namespace lamina::plan {

// The work of one partition per microbatch, and what it holds.
struct Stage {
  double time_us = 0;                // forward and backward; 0 where the tree has no times
  std::int64_t parameter_bytes = 0;  // shared ones once
  std::int64_t memory_bytes = 0;     // parameters, their gradients, and activations of the microbatches held at once
  std::int64_t out_bytes = 0;        // sent to other partitions by a forward; a backward receives as much
};

// The promises of a plan.
struct Report {
  Assignment owners;
  std::vector<Stage> stages;     // by partition
  double predicted_step_us = 0;  // of the simulated schedule; 0 where the tree has no times
  double bubble = 0;             // the part of all ranks' time in which they do nothing
  std::string warning;           // one line when one partition holds up all others, with what it owns; else empty
};

Report report(const ModuleTree& tree, const Assignment& owners, const Goal& goal);

// The report as the table that is printed at the first step, a row per partition. A row has the partition's modules,
// their parameters and share of the whole, time (where known) and memory, and the bytes that a forward sends to other
// partitions. Modules that it owns whole go by name ("blocks.0-2" for a run of siblings), and those that it owns
// without all of their children as "name (itself)". Then a line with step and bubble, and the warning. Ends with a
// newline.
std::string describe(const ModuleTree& tree, const Report& report);

// Lists those names in one line for logs: "Partition assignments: {0: [model (itself), embedding], 1: [blocks]}".
std::string assignments_line(const ModuleTree& tree, const Assignment& owners, int partitions);

}  // namespace lamina::plan
