// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <span>
#include <vector>

#include "lamina/collective/process_group.h"
#include "lamina/data_parallel/named_tensor.h"

namespace lamina::data_parallel {

// Gradients of one type on one device, which travel as one tensor.
struct GradientBucket {
  std::int64_t index = 0;
  bool last = false;  // of this reduction
  std::vector<at::Tensor> parameters;
  at::Tensor gradients;  // 1-D: one after the other; zero where there is none
};

// What takes the place of a bucket's gradients: of their size and type.
using Reduce = std::function<at::Tensor(const GradientBucket&)>;

// The sum over the replicas, divided by `divisor`.
Reduce mean_over(collective::ProcessGroup& replicas, int divisor);

// Collective over the replicas: replaces the gradient of every parameter by what `reduce` makes of them. A gradient
// that no replica has stays undefined; where only some have one it counts as zero on the others. Sparse gradients
// become dense.
//
// Buckets hold about `bucket_bytes`, which bounds the memory this takes. Throws base::UsageError when the replicas'
// parameters differ, and what `reduce` and `replicas` throw: some gradients are then reduced and some are not.
void reduce_gradients(std::span<const NamedTensor> parameters, collective::ProcessGroup& replicas,
                      std::int64_t bucket_bytes, const Reduce& reduce);

}  // namespace lamina::data_parallel
