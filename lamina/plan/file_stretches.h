// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "lamina/config/json_reader.h"
#include "lamina/plan/module_tree.h"

namespace lamina::plan {

// The largest numbers in a plan's file.
constexpr double kMostTime = 1e15;
constexpr std::int64_t kMostBytes = 1'000'000'000'000'000;

// The stretches of a node of a plan's file. Throws base::ConfigError that names it.
std::vector<Stretch> read_stretches(config::JsonReader& node);

// The stretches of all nodes, and whether what these read is among them.
class StretchReads {
 public:
  void add(const std::vector<Stretch>& stretches);
  // Throws base::ConfigError where one of them reads a stretch that does not come before it, or is not there.
  void check(const std::vector<Stretch>& stretches, const std::string& where) const;

 private:
  std::set<int> places_;
};

}  // namespace lamina::plan
