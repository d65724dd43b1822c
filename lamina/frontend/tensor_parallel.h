// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

// Exchanges between the ranks of a TP_GROUP, which all of them make in the same order: see [Note: operators of slices]
// in lamina/tensor_parallel/operators.h for their gradients. `sizes`: how many positions along `dim` each rank has;
// empty: all the same. With one rank they give what they are given. Tensors have any type; those of terms have numbers
// that can be added. All throw base::UsageError before init and for a tensor that the sizes do not fit, and
// base::DesyncError where ranks call other ones, or give other shapes or types.
namespace lamina {

// Returns the same. Its gradient is the sum of the ranks' gradients: each has used it for a part of its own.
at::Tensor tp_copy(const at::Tensor& whole);
// The sum of the ranks' terms, alike on all of them.
at::Tensor tp_all_reduce(const at::Tensor& terms);
// All parts side by side, alike on all ranks, who do the same with it.
at::Tensor tp_gather(const at::Tensor& part, std::int64_t dim, const std::vector<std::int64_t>& sizes = {});
// This rank's part of what all have alike.
at::Tensor tp_scatter(const at::Tensor& whole, std::int64_t dim, const std::vector<std::int64_t>& sizes = {});
// All parts side by side, which each rank uses for a part of its own.
at::Tensor tp_all_gather(const at::Tensor& part, std::int64_t dim, const std::vector<std::int64_t>& sizes = {});
// This rank's part of the sum of the ranks' terms.
at::Tensor tp_reduce_scatter(const at::Tensor& terms, std::int64_t dim, const std::vector<std::int64_t>& sizes = {});
// From all along `from_dim`, and this rank's part along `to_dim`, this rank's part along `from_dim`, and all along
// `to_dim`.
at::Tensor tp_all_to_all(const at::Tensor& given, std::int64_t from_dim, std::int64_t to_dim,
                         const std::vector<std::int64_t>& from_sizes = {},
                         const std::vector<std::int64_t>& to_sizes = {});

}  // namespace lamina
