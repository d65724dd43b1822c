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
};

// The "nodes" of a plan's file, as JSON: python/lamina/tracing/cli.py finds them out. What it says on stderr is
// passed on.
// Nothing when it fails, after it has said why. Throws base::ConfigError when it cannot be started.
std::optional<std::string> model_nodes(const PlannedModel& model);

}  // namespace lamina::command
