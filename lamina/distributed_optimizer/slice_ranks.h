// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <span>
#include <utility>
#include <vector>

#include "lamina/collective/ranks.h"
#include "lamina/layout/parameter_layout.h"
#include "lamina/optim/functional.h"

namespace lamina::distributed_optimizer {

// A parameter in an update of which this rank has a slice.
struct SlicedUpdate {
  optim::Update* update;
  int slices;
};

// The ranks that have slices of the same parameters: a TP_GROUP. What is collective is so over them, with slices of the
// same parameters in the same order.
class SliceRanks {
 public:
  explicit SliceRanks(collective::Ranks ranks) : ranks_(std::move(ranks)) {}

  int size() const { return ranks_.topology.size(topology::Group::kTp); }
  int rank() const { return ranks_.topology.index(topology::Group::kTp, ranks_.own); }
  bool are_several() const { return size() > 1; }

  // This rank's slice of what is like the whole parameter.
  at::Tensor part_of(const at::Tensor& whole, const layout::Slicing& slicing) const;
  // Collective: the whole of what is like each rank's slice.
  at::Tensor whole_of(const at::Tensor& value, const layout::Slicing& slicing) const;
  // Collective: the slice gets its elements of the whole that this member has; undefined on the others.
  void take_slice(const at::Tensor& slice, const at::Tensor& whole, const layout::Slicing& slicing, int member) const;
  // Collective, once for the whole list: what each rank has measured of its slices becomes what they measure together.
  // Ranks are added up in their order: the same bits on all.
  void combine(std::span<const SlicedUpdate> updates, std::span<const fused::Combine> how) const;

 private:
  std::vector<base::Rank> members() const { return ranks_.topology.members(topology::Group::kTp, ranks_.own); }

  const collective::Ranks ranks_;
};

}  // namespace lamina::distributed_optimizer
