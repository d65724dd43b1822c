// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "lamina/plan/problem.h"
#include "lamina/plan/traffic.h"

namespace lamina::plan {

// Returns owners of items such that few bytes of values go between ranks. No rank has more than 1.1 times its even
// share of the cost, or than the heaviest item has alone; where that cannot be, as little more as is found. Of equally
// few bytes, those with fewest messages are taken, and of those the most even. Items that are placed stay there. Ranks
// are numbered in the order of the visits where nothing is placed by hand. Finds the fewest for about a dozen items.
std::vector<int> fewest_bytes(const Problem& problem, const Traffic& traffic);

}  // namespace lamina::plan
