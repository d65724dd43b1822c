// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "lamina/plan/goal.h"
#include "lamina/plan/report.h"
#include "lamina/plan/sliced_layers.h"

// The file that `lamina plan` reads, and what it writes; docs/planning.md describes both.
namespace lamina::plan {

struct PlanFile {
  Goal goal;
  ModuleTree tree;
  std::vector<std::string> ids;  // per node
  SlicedLayers sliced;           // none where all layers are whole
  bool graph = false;            // of operations: see plan/graph_plan.h
};

// Throws base::ConfigError: one line that names the field, and the node it belongs to.
PlanFile read_plan_file(std::string_view json);

// One line of JSON: {"partition": {id: p}, "stages": [...], "predicted_step_us", "bubble", "warning"}, and "slices"
// where layers are cut.
std::string to_json(const PlanFile& file, const Report& report);

}  // namespace lamina::plan
