// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "lamina/plan/task.h"

namespace lamina::plan {

// Task::cost of each item, in billionths.
std::vector<std::int64_t> mixed_costs(const Task& task, double memory_weight);

// Owners of items: contiguous in the order of the route, with the largest of these costs as small as possible.
std::vector<int> cut_route(const Task& task, double memory_weight);

}  // namespace lamina::plan
