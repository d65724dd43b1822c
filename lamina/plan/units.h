// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "lamina/plan/partition.h"
#include "lamina/plan/sharing.h"

namespace lamina::plan {

// What the planner keeps whole: a module with everything under it, and the modules above it that go where it goes
// because they were expanded and it is the first of their parts.
struct Unit {
  int node = 0;
  std::int64_t bytes = 0;
  std::vector<int> heads;
};

// The tree with what it weighs: shared parameters count once, where their group is.
class WeighedTree {
 public:
  explicit WeighedTree(const ModuleTree& tree);

  Unit root() const { return {0, bytes_[0], {}}; }
  std::int64_t bytes(int node) const { return bytes_[node]; }  // of the whole subtree
  int first_holder(int node) const { return holder_[node]; }   // first of the subtree that has parameters, or -1
  int group(int node) const { return sharing_.first[node]; }   // first node of those owned with this one

  // The parts of a unit in module order, at least two with the bytes of the whole, or none when it has to stay whole.
  std::vector<Unit> expand(Unit unit) const;

 private:
  std::vector<Unit> parts(const Unit& unit) const;
  void collect(int node, std::vector<Unit>& into) const;

  const ModuleTree& tree_;
  Sharing sharing_;
  std::vector<std::int64_t> bytes_;
  std::vector<int> holder_;
  std::vector<std::vector<int>> children_;
};

}  // namespace lamina::plan
