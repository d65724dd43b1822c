// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "lamina/plan/cut.h"
#include "lamina/plan/units.h"

namespace lamina::plan {

// The units of a tree in module order, and where they are cut: segment i belongs to partition i.
struct Division {
  std::vector<Unit> units;
  Cut cut;
};

// Keeps modules whole while the largest segment is near the mean, and expands the heavy ones where it is not.
Division divide(const WeighedTree& tree, int partitions);

}  // namespace lamina::plan
