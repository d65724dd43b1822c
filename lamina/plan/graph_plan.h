// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "lamina/config/config.h"
#include "lamina/plan/planner.h"
#include "lamina/plan/report.h"

// Plans of graphs of operations. Such a graph is a tree whose root is what lies outside, on every rank. The nodes under
// it are the items, and each of their stretches makes one value.
namespace lamina::plan {

// Has few bytes go between ranks that have nearly the same to do: see plan/fewest_bytes.h. Throws base::ConfigError
// when it finds nothing that fits into memory.
std::unique_ptr<Planner> graph_planner();

// A report in which ranks send values as graphs do: see [Note: traffic].
Report report_graph(const ModuleTree& tree, const Assignment& owners, const Goal& goal);

// As plan_for(), of a graph.
Report plan_graph_for(const config::Config& config, const ModuleTree& tree);

}  // namespace lamina::plan
