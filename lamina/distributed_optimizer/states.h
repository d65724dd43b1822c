// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <string>
#include <vector>

#include "lamina/collective/ranks.h"
#include "lamina/distributed_optimizer/groups.h"
#include "lamina/distributed_optimizer/local_parameters.h"
#include "lamina/distributed_optimizer/user_optimizer.h"

namespace lamina::distributed_optimizer {

// The state of an optimizer by the names of parameters: see [Note: names of parameters].
struct NamedState {
  std::map<std::string, value::Value> states;  // each a dictionary by name
  std::map<std::string, at::Tensor> masters;
};

// How much of a state it is.
enum class Extent {
  kPart,   // what this rank updates, of its parts of parameters
  kSlice,  // the same, of its slices and of parameters that are not sliced: collective over those who hold shards
  kHere,   // the same, of whole parameters: collective over those who hold parts
  kWhole,  // all of it, on all ranks: collective over those that have one copy of the model, too
  kFirst,  // all of it on the first of these, nothing on the others
};

// The states of an optimizer's members, taken apart and put together.
class States {
 public:
  // All outlive it.
  States(collective::Ranks ranks, LocalParameters& parameters, const OptimizerGroups& groups)
      : ranks_(std::move(ranks)), parameters_(parameters), groups_(groups) {}

  NamedState state(const UserOptimizer& user, Extent extent) const;
  // For each member here its part of a state; None where that has none. `are_parts`: of a state that has this rank's
  // parts already.
  std::vector<value::Value> parts_of(const UserOptimizer& user, const NamedState& state, bool are_parts) const;
  // The states that these ranks have together, of which each has some: collective over one copy of the model.
  NamedState gathered(const UserOptimizer& user, NamedState own) const;
  // Says what keeps masters here from having the values in a state, "" if nothing.
  std::string misfit(const UserOptimizer& user, const std::map<std::string, at::Tensor>& masters, bool are_parts) const;
  // Gives masters here the values in a state.
  void take_masters(const UserOptimizer& user, const std::map<std::string, at::Tensor>& masters, bool are_parts) const;

 private:
  using Here = std::vector<OptimizerGroups::Member>;
  Here here(const UserOptimizer& user) const;
  void join(const Here& here, NamedState& state, bool joins_slices, bool states_are_whole) const;
  void add_others(const UserOptimizer& user, NamedState& state, std::span<const base::Rank> ranks, bool to_first) const;

  const collective::Ranks ranks_;
  LocalParameters& parameters_;
  const OptimizerGroups& groups_;
};

}  // namespace lamina::distributed_optimizer
