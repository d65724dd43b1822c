// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "lamina/layout/parameter_layout.h"
#include "lamina/layout/region.h"
#include "lamina/tensor_parallel/team.h"

// Parameters of layers that are cut over a team: one member's slice of a whole, and the whole of all slices.
namespace lamina::tensor_parallel {

// The slice of a whole that one of so many members of a team has, in memory of its own; padding is zero. Throws
// base::ConfigError where the whole cannot be cut so.
at::Tensor slice_of(const at::Tensor& whole, const layout::Slicing& slicing, int member, int members);

// The whole of the slices that the members of a team have, in their order.
at::Tensor whole_of(std::span<const at::Tensor> slices, const layout::Slicing& slicing);
// Collective over the team, whose members have a slice each: the whole. Throws what Team::all_gather() throws.
at::Tensor whole_of(Team& team, const at::Tensor& slice, const layout::Slicing& slicing);

// The sizes of the whole of which that is a slice.
std::vector<std::int64_t> whole_shape(const at::Tensor& slice, const layout::Slicing& slicing);

// The positions that each of so many members has of an extent that is cut as one section, in units that are not torn.
std::vector<layout::Share> shares_of(std::int64_t extent, std::int64_t unit, int members);
// Throws base::UsageError where a member has none of what `what` says that there is: "q_proj has 6 features".
void require_each(const std::string& what, const std::vector<layout::Share>& shares);
// How many these are.
std::vector<std::int64_t> sizes_of(const std::vector<layout::Share>& shares);

}  // namespace lamina::tensor_parallel
