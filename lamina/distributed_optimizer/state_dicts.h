// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "lamina/collective/ranks.h"
#include "lamina/distributed_optimizer/groups.h"
#include "lamina/distributed_optimizer/states.h"
#include "lamina/optim/loss_scale.h"
#include "lamina/topology/saved_place.h"

namespace lamina::distributed_optimizer {

// A state dict of an optimizer. A face makes its own form of it, and it of that. What else a form has, as the options
// of groups, stays with the face.
struct StateDict {
  struct Row {
    std::string name;    // of the parameter; "" in a whole one that is loaded, where its place in the groups says it
    std::string given;   // see OptimizerGroups::Member
    value::Value state;  // a dictionary by name; None for none
    at::Tensor master;   // undefined for none
  };
  // States are parts, of so many, of those of the parameters.
  struct Parts {
    std::string over;  // the group that has them all: "shard" or "rdp"
    std::int64_t part = 0, count = 1;
    friend bool operator==(const Parts&, const Parts&) = default;
  };
  std::vector<std::vector<Row>> groups;
  bool is_partial = false;        // it has what one rank updates; else the whole optimizer
  topology::SavedPlace saved_by;  // of a partial one; empty where nobody has said it
  std::optional<Parts> parts;     // none where states are those of whole parameters, or of slices
  std::optional<optim::LossScale::State> scale;
  std::string no_scale;  // the words of a face for a loss scale that is none
};

// Makes state dicts of an optimizer, and the states of this rank out of them.
class StateDicts {
 public:
  // All outlive it.
  StateDicts(collective::Ranks ranks, LocalParameters& parameters, const OptimizerGroups& groups, const States& states,
             const optim::LossScale& scale)
      : ranks_(std::move(ranks)), parameters_(parameters), groups_(groups), states_(states), scale_(scale) {}

  // True where that of the user's optimizer is the whole one.
  bool is_plain(const UserOptimizer& user) const;
  // True of one that is to be loaded when the model is cut.
  bool waits(const StateDict& dict) const;

  // The whole optimizer's, on all ranks, or else on the first alone and nothing on the others: collective over one copy
  // of the model.
  std::optional<StateDict> whole(const UserOptimizer& user, bool to_first) const;
  // This rank's. `joins_shards`: with states of whole parameters, or slices, collective over those who hold parts.
  StateDict own(const UserOptimizer& user, bool joins_shards) const;
  // The parts that states have here; none where they are those of whole parameters, or of slices.
  std::optional<StateDict::Parts> parts() const;

  // The state, of at least what this rank has: collective over one copy of the model, once it is cut. A partial one of
  // another cut is put together with those of the other ranks. Throws base::UsageError, alike on all ranks, for what
  // does not fit.
  NamedState found_in(const UserOptimizer& user, const StateDict& dict) const;
  // Throws base::UsageError, as far as this rank knows, for what will not fit when the model is cut.
  void require_fits(const UserOptimizer& user, const StateDict& dict) const;
  void require_scale(const StateDict& dict) const;

 private:
  struct Known {
    std::string name, given;
    bool here;
  };
  struct Word;
  using Layout = std::vector<std::vector<Known>>;
  using Names = std::vector<std::vector<std::string>>;

  Layout known(const UserOptimizer& user) const;
  Layout layout(const UserOptimizer& user) const;
  Layout agreed(const UserOptimizer& user, const std::vector<Layout>& everyone) const;
  NamedState named(const StateDict& dict, const Layout& layout) const;
  StateDict row_by_row(const NamedState& state, const Layout& layout) const;
  std::string misfit(const UserOptimizer& user, const StateDict& dict, const Layout& layout) const;
  std::string misfit_of_groups(const StateDict& dict, const Layout& layout) const;
  std::string misfit_of_parts(const StateDict& dict) const;
  std::string misfit_of_scale(const StateDict& dict) const;
  void require_all(const std::vector<Word>& everyone, const Layout& layout) const;
  std::string home_of(const std::string& name) const;

  const collective::Ranks ranks_;
  LocalParameters& parameters_;
  const OptimizerGroups& groups_;
  const States& states_;
  const optim::LossScale& scale_;
};

}  // namespace lamina::distributed_optimizer
