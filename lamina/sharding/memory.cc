// SPDX-License-Identifier: Apache-2.0
#include "lamina/sharding/memory.h"

#include <ATen/core/Tensor.h>

#include <algorithm>

#include "lamina/device/rank_device.h"
#include "lamina/value/away.h"

namespace lamina::sharding {

MemoryNeed need_of(const model::ParameterTable& table, std::int64_t available) {
  MemoryNeed need{.available = available};
  for (const auto* row : table.here()) {
    const auto bytes = row->tensor.numel() * static_cast<std::int64_t>(row->tensor.element_size());
    const bool is_there = value::memory_of(row->tensor) != nullptr && row->tensor.device() == devices::rank_device();
    if (is_there) need.there += bytes;
    if (row->layout.shards > 1) {
      need.sharded += bytes;
      continue;
    }
    need.whole += bytes;
    if (row->tensor.requires_grad()) need.trained += bytes;
  }
  return need;
}

std::optional<int> smallest_degree(std::span<const MemoryNeed> ranks, int replicas) {
  for (int degree = 1; degree <= replicas; ++degree) {
    if (replicas % degree != 0) continue;
    if (std::ranges::all_of(ranks, [degree](const MemoryNeed& rank) { return rank.fits(degree); })) return degree;
  }
  return {};
}

}  // namespace lamina::sharding
