// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "lamina/plan/problem.h"

namespace lamina::plan {

// Problem::cost of each item, in billionths.
std::vector<std::int64_t> weighted_costs(const Problem& problem, double memory_weight);

// Owners of items: as many parts as partitions, or so many, contiguous in the order of the route, with the largest of
// these costs as small as possible.
std::vector<int> split_route(const Problem& problem, double memory_weight);
std::vector<int> split_route(const Problem& problem, double memory_weight, int parts);

}  // namespace lamina::plan
