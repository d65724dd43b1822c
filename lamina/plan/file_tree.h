// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "lamina/plan/file_stretches.h"
#include "lamina/plan/goal.h"
#include "lamina/plan/module_tree.h"

namespace lamina::plan {

// The nodes of a plan's file as a tree: parents before children, children as they stand in the file. Throws
// base::ConfigError that names node and field.
struct FileTree {
  FileTree(const nlohmann::json& nodes, const nlohmann::json& shared, const Goal& goal);

  ModuleTree tree;
  std::vector<std::string> ids;
};

}  // namespace lamina::plan
