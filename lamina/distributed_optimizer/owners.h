// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

#include "lamina/distributed_optimizer/shard_ranks.h"

namespace lamina::distributed_optimizer {

// [Note: owners] Where an optimizer needs all of its parameters, each that several ranks hold parts of has an *owner*
// among them, which updates it for all, and has its states. In a step the owner's groups have the whole parameter in
// the place of its part, those of the others have nothing there; afterwards all groups have parts again. Between steps
// the owner keeps a state under its part.
class Owners {
 public:
  // Says what part of a parameter a member of a group is; none for one that is whole here.
  using PartOf = std::function<std::optional<LocalShard>(const at::Tensor& local)>;

  explicit Owners(const ShardRanks& ranks) : shard_ranks_(ranks), load_(ranks.size()) {}

  // Gives those that have none an owner: the largest ones first, each to the member that has the fewest bytes. All
  // holders call it with parts of the same parameters in the same order.
  void spread(std::span<const at::Tensor> locals, const PartOf& part_of);
  // True where this rank updates all of a parameter whose part it is; of others, too, false.
  bool owns(const at::Tensor& local) const;

  // Collective over the holders. Gives what the groups have in a step for each of these: the whole with its gradient,
  // or nothing where another rank updates it, or no part has a gradient. A tensor that is no part stays itself.
  std::vector<at::Tensor> begin(std::span<const at::Tensor> locals, const PartOf& part_of);
  // Collective over the holders: all parts get the values of the wholes.
  void end();
  // After a step that failed.
  void forget();

 private:
  const ShardRanks& shard_ranks_;
  std::vector<std::size_t> load_;  // bytes, by member
  std::unordered_map<const at::TensorImpl*, int> owner_of_part_;
  std::vector<OwnedShard> updated_;  // in this step
  std::vector<at::Tensor> wholes_;
};

}  // namespace lamina::distributed_optimizer
