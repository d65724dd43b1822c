// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <vector>

namespace lamina::collective {

// The tensors of all members, in their order, of a dense contiguous one of each: all of one type and one shape.
using GatherDense = std::function<std::vector<at::Tensor>(const at::Tensor& mine)>;

// The sum of the members' sparse tensors (COO), coalesced: of each position what a sum of dense ones has, in the order
// of the members, as Gloo adds them. Throws base::UsageError, on all members, where shapes or types differ.
at::Tensor sum_of_sparse(const at::Tensor& mine, const GatherDense& gather);

}  // namespace lamina::collective
