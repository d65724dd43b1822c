// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <span>
#include <vector>

#include "lamina/collective/process_group.h"
#include "lamina/data_parallel/named_tensor.h"

namespace lamina::data_parallel {

// Collective over the replicas, each with flags of its own for the same number of tensors: the flags that any replica
// has set. Throws base::UsageError on all of them when names, shapes or types of the tensors differ: collectives over
// them would mix up values.
std::vector<bool> any_replica(std::span<const NamedTensor> tensors, const std::vector<bool>& flags,
                              collective::ProcessGroup& replicas);

}  // namespace lamina::data_parallel
