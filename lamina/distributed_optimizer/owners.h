// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

#include "lamina/distributed_optimizer/shard_ranks.h"
#include "lamina/distributed_optimizer/slice_ranks.h"

namespace lamina::distributed_optimizer {

// [Note: owners] Where an optimizer needs all of its parameters, each that several ranks hold parts of has an *owner*
// among them, which updates it for all, and has its states. In a step the owner's groups have the whole parameter in
// the place of its part, those of the others have nothing there; afterwards all groups have parts again. Between steps
// the owner keeps a state under its part. Of a parameter that is sliced and divided, too, a member that holds parts of
// each slice has all of that slice first; these members' owner has all of it.
class Owners {
 public:
  // A member of a group: its part of a parameter, or of a slice of one, and how that is sliced. Neither for one that is
  // whole here.
  struct Held {
    std::optional<LocalShard> part;
    const layout::Slicing* slicing = nullptr;
    std::int64_t elements = 0;  // of the whole

    bool is_part() const { return part || slicing != nullptr; }
  };
  using HeldIn = std::function<Held(const at::Tensor& local)>;

  // `shard_ranks`: nullptr where nothing is divided.
  Owners(const ShardRanks* shard_ranks, const SliceRanks& slice_ranks)
      : shard_ranks_(shard_ranks),
        slice_ranks_(slice_ranks),
        load_(shard_ranks == nullptr ? 1 : shard_ranks->size()),
        load_of_slices_(slice_ranks.size()) {}

  // Gives those that have none an owner: the largest ones first, each to the member that has the fewest bytes. All
  // holders call it with parts of the same parameters in the same order.
  void spread(std::span<const at::Tensor> locals, const HeldIn& held_in);
  // True where this rank updates all of a parameter whose part it is; of others, too, false.
  bool owns(const at::Tensor& local) const;

  // Collective over the holders. Gives what the groups have in a step for each of these: the whole with its gradient,
  // or nothing where another rank updates it, or no part has a gradient. A tensor that is no part stays itself.
  std::vector<at::Tensor> begin(std::span<const at::Tensor> locals, const HeldIn& held_in);
  // Collective over the holders: all parts get the values of the wholes.
  void end();
  // After a step that failed.
  void forget();

 private:
  struct Owner {
    std::optional<int> of_parts;  // among those that hold parts of a slice, or of what is not sliced; none: all have it
    int of_slices = 0;            // among the slices
  };
  // A parameter in this step: `slice` is all of this rank's slice where it owns the parts of that.
  struct Updated {
    at::Tensor slice, gradient, whole;
    const layout::Slicing* slicing = nullptr;
    Owner owner;
  };
  bool owns_parts(const Owner& owner) const { return !owner.of_parts || *owner.of_parts == shard_ranks_->rank(); }
  void join_parts(std::span<const at::Tensor> values, std::span<const at::Tensor> gradients);
  void join_slices();

  const ShardRanks* const shard_ranks_;
  const SliceRanks& slice_ranks_;
  std::vector<std::int64_t> load_, load_of_slices_;  // bytes, by member
  std::unordered_map<const at::TensorImpl*, Owner> owner_of_part_;
  std::vector<Updated> updated_;      // in this step
  std::vector<OwnedShard> parts_;     // of these, those that are divided
  std::vector<std::size_t> divided_;  // and their places there
};

}  // namespace lamina::distributed_optimizer
