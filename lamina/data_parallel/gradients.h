// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <span>

#include "lamina/collective/process_group.h"
#include "lamina/data_parallel/named_tensor.h"

namespace lamina::data_parallel {

// Collective over the replicas: replaces the gradient of every parameter by its mean over them. A gradient that no
// replica has stays undefined; where only some have one it counts as zero on the others. Sparse gradients become dense.
//
// Gradients of one type and device travel together, about `bucket_bytes` at a time, which bounds the memory this takes.
// Throws base::UsageError when the replicas' parameters differ, and what `replicas` throws: some gradients are then
// averaged and some are not.
void average_gradients(std::span<const NamedTensor> parameters, collective::ProcessGroup& replicas,
                       std::int64_t bucket_bytes);

}  // namespace lamina::data_parallel
