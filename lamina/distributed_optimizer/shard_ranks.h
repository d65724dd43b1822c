// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "lamina/base/wait.h"
#include "lamina/collective/group.h"
#include "lamina/layout/region.h"
#include "lamina/optim/functional.h"

namespace lamina::distributed_optimizer {

// [Note: local shards] Where several ranks hold the same parameters, each updates a *part* of every one. A part is this
// rank's shard, or its share of a parameter that all of them have whole, or the master of either. The parameter's row
// says which elements these are.
struct LocalShard {
  at::Tensor own;
  at::Tensor parameter;  // all of it, maybe without its value
  layout::Share share;   // elements of it, flattened
};

// A part of a parameter that one member updates for all.
struct OwnedShard {
  LocalShard part;
  int owner;
};

// The ranks that hold parts of the same parameters. What is collective is so over them, with parts of the same
// parameters in the same order.
class ShardRanks {
 public:
  // `group` outlives this.
  ShardRanks(collective::Group& group, base::Patience patience) : group_(group), patience_(std::move(patience)) {}

  int size() const { return group_.size(); }
  int rank() const { return group_.rank(); }

  // This member's elements of what is like the parameter, as its part has them.
  at::Tensor part_of(const LocalShard& part, const at::Tensor& whole) const;

  // Collective: the members' values, each like its part, as one of the parameter's shape.
  at::Tensor whole_of(const LocalShard& part, const at::Tensor& value) const;
  // Collective, once for the whole list: what each member has measured of its parts becomes what they measure together.
  // Members are added up in their order: the same bits on all.
  void combine(std::span<optim::Update* const> parts, std::span<const fused::Combine> how) const;
  // Collective: of each parameter a number that is not 0 where some member has given one.
  std::vector<std::uint8_t> any(std::vector<std::uint8_t> given) const;
  // Collective: each has updated its part of these, which all have whole; all get all of them. In portions of some 32
  // MiB.
  void gather(std::span<const at::Tensor> parameters);

  // For an optimizer that needs all of a parameter: see [Note: needs]. Collective: the members' values, each like its
  // part, as wholes of the parameters' shapes on their owners; undefined on others. A value that is undefined is zero.
  std::vector<at::Tensor> to_owners(std::span<const OwnedShard> parts, std::span<const at::Tensor> values) const;
  // The way back: gives each part its elements of the whole, which is undefined where others own it.
  void from_owners(std::span<const OwnedShard> parts, std::span<const at::Tensor> wholes) const;

 private:
  layout::Share share(const at::Tensor& parameter, int member) const {
    return layout::share_of(parameter.numel(), size(), member);
  }
  void gather_portion(std::span<const at::Tensor> parameters);
  // Memory for so many elements, which the next call has again: new pages would cost more than the copies.
  at::Tensor scratch(std::size_t number, std::int64_t length, const at::TensorOptions& options);
  // Parts that travel together: those of one type and device, by owner.
  struct Parcel;
  std::vector<Parcel> parcels_of(std::span<const OwnedShard> parts) const;

  collective::Group& group_;
  const base::Patience patience_;
  std::array<at::Tensor, 2> scratch_;
};

}  // namespace lamina::distributed_optimizer
