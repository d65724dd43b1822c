// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <span>

#include "lamina/collective/group.h"
#include "lamina/data_parallel/named_tensor.h"

namespace lamina::data_parallel {

// Collective over the replicas, which have agreed on the tensors: gives every one, in place, the value it has on
// replica `root`. Throws what `replicas` throws.
void broadcast(std::span<const NamedTensor> tensors, collective::Group& replicas, int root,
               const collective::CallOptions& options);

}  // namespace lamina::data_parallel
