// SPDX-License-Identifier: Apache-2.0
#include "lamina/plan/check_memory.h"

#include <algorithm>

#include "lamina/base/error.h"
#include "lamina/base/str.h"
#include "lamina/plan/format.h"
#include "lamina/plan/owned_names.h"
#include "lamina/plan/prediction.h"
#include "lamina/plan/tied_parameters.h"

namespace lamina::plan {

void check_memory(const ModuleTree& tree, const Assignment& owners, const Goal& goal) {
  if (!goal.memory_limit_bytes) return;
  const std::vector<std::int64_t> needed = memory_bytes(tree, owners, goal);
  const auto fullest = std::ranges::max_element(needed) - needed.begin();
  const std::int64_t missing = needed[fullest] - *goal.memory_limit_bytes;
  if (missing <= 0) return;
  const std::vector<std::int64_t> parameter_bytes = group_bytes(tree);
  std::size_t largest = 0;
  std::int64_t most = -1;
  for (std::size_t node = 0; node < tree.size(); ++node) {
    const std::int64_t bytes = held_bytes(parameter_bytes[node], tree[node].activation_bytes, goal.held());
    if (owners[node].value == fullest && bytes > most) {
      most = bytes;
      largest = node;
    }
  }
  throw base::ConfigError(base::str("no plan found that fits into ", *goal.memory_limit_bytes, " bytes per rank: ",
                                    missing, " bytes (", format_bytes(missing), ") are missing in partition ", fullest,
                                    ", where the largest module is ", shown(tree[largest]), " with ", most,
                                    " bytes; allow more memory, more partitions, or fewer active microbatches"));
}

}  // namespace lamina::plan
