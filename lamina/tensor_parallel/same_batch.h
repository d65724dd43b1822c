// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <span>

#include "lamina/tensor_parallel/team.h"

namespace lamina::tensor_parallel {

// Collective over the team, whose members are to have been given the same tensors: throws base::DesyncError where bits
// differ, with the ranks of two of them. `ranks`: those of all members.
void require_same_batch(Team& team, std::span<const at::Tensor> given, std::span<const base::Rank> ranks);

}  // namespace lamina::tensor_parallel
