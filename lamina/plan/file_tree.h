// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "lamina/plan/goal.h"
#include "lamina/plan/module_tree.h"

namespace lamina::plan {

constexpr double kMostTime = 1e15;
constexpr std::int64_t kMostBytes = 1'000'000'000'000'000;

// The nodes of a plan's file as a tree: parents before children, children as they stand in the file. Throws
// base::ConfigError that names node and field.
struct FileTree {
  FileTree(const nlohmann::json& nodes, const nlohmann::json& shared, const Goal& goal);

  ModuleTree tree;
  std::vector<std::string> ids;
};

}  // namespace lamina::plan
