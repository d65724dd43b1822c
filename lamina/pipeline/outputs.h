// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>

namespace lamina::pipeline {

// A tensor that a step function returned, once per microbatch, made one. All results are new tensors.

// The mean over the samples of means over those of each microbatch; of integers in the default dtype. All microbatches
// count alike where `samples`, of each, is empty.
at::Tensor mean_of_outputs(at::TensorList outputs, std::span<const std::int64_t> samples);
// Along axis 0: the whole batch again. 0-dimensional ones are stacked.
at::Tensor concat_outputs(at::TensorList outputs);
// Along a new axis 0. Throws base::UsageError where their shapes differ, as the mean does.
at::Tensor stack_outputs(at::TensorList outputs);

}  // namespace lamina::pipeline
