// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <span>

#include "lamina/collective/process_group.h"
#include "lamina/data_parallel/named_tensor.h"

namespace lamina::data_parallel {

// Collective over the replicas: gives every buffer, in place, the value it has on replica `root`. Throws
// base::UsageError when the replicas' buffers differ in more than their values, and what `replicas` throws.
void broadcast_buffers(std::span<const NamedTensor> buffers, collective::ProcessGroup& replicas, int root = 0);

}  // namespace lamina::data_parallel
