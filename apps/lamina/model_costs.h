// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <string>
#include <vector>

namespace lamina::command {

// A model in Python, as `lamina plan --model` is told of it.
struct PlannedModel {
  std::string callable;             // "package.module:callable", which returns it
  std::vector<std::string> inputs;  // of one microbatch: expressions, or NAME=EXPRESSION
  bool times = false;               // measured, instead of counted
  int partitions = 1;
  int degree = 1;              // of ranks over which its layers are cut
  bool has_one_batch = false;  // for all of these
  std::string optimize = "memory";
};

// The "nodes" of a plan's file, and its "slices", as members in JSON: python/lamina/planning/cli.py finds them out.
// Passes on what it says on stderr.
// Nothing when it fails, after it has said why. Throws base::ConfigError when it cannot be started.
std::optional<std::string> model_members(const PlannedModel& model);

}  // namespace lamina::command
