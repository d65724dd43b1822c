// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/optim/optimizer.h>

#include <cstdint>
#include <functional>
#include <vector>

#include "lamina/frontend/on_partition.h"
#include "lamina/frontend/optimizer_state.h"
#include "lamina/fused/declaration.h"
#include "lamina/session/optimizer_steps.h"

namespace lamina::frontend {

// The groups of an optimizer. When the model is cut, what this rank updates takes the places of the parameters that the
// groups were made with; see [Note: parts], [Note: stand-ins].
class OptimizerGroups {
 public:
  // All outlive it.
  OptimizerGroups(torch::optim::Optimizer& optimizer, session::OptimizerSteps& steps, fused::Needs needs)
      : optimizer_(optimizer), steps_(steps), needs_(needs) {}

  // Makes groups that are new, or all of them the first time, this rank's part.
  void replace(const HeldHere& held);
  bool are_replaced() const { return made_with_.size() == optimizer_.param_groups().size(); }
  // All that the groups have.
  std::vector<at::Tensor> places() const;

  // Options of the groups, a line for each: see [Note: options] in distributed_optimizer/options.h.
  // `counts`: how many parameters they have is one.
  std::string options(bool counts) const;

  // Has `update` see whole parameters, where the optimizer needs all of each: see [Note: owners]. Collective, then.
  void update(const std::function<void()>& update);

  // The state of the whole optimizer, or, without `gathers`, that of this rank, with its parts. With it collective over
  // the holders of parts, and over `pipeline`.
  OptimizerState state(bool gathers, std::span<const base::Rank> pipeline, messaging::Mailbox& mailbox,
                       const base::Patience& patience) const;
  // Tensors that this rank has in the places of parameters, by group.
  struct Place {
    std::int64_t number;  // of the parameter, in the groups of the whole optimizer
    at::Tensor tensor;
  };
  std::vector<std::vector<Place>> numbered() const;
  // The parameters of the whole optimizer, by group, in the order of their numbers.
  std::vector<std::vector<at::Tensor>> made_with() const;
  // False where another rank has the state of a parameter, a part of which stands at `place`.
  bool has_state_of(const at::Tensor& place) const {
    return needs_ != fused::Needs::kWhole || !steps_.part(place) || steps_.updates_whole(place);
  }
  // Says what is wrong with a state, "" if nothing.
  std::string misfit(const OptimizerState& state) const;
  // Takes over this rank's part of a state, which may be that part alone. With `options` those of the groups, too.
  void load(const OptimizerState& state, bool options);

 private:
  void gather_parts(OptimizerState& state) const;
  void gather_from(OptimizerState& state, std::span<const base::Rank> ranks, messaging::Mailbox& mailbox,
                   const base::Patience& patience) const;
  Fields part_of(const Place& place, const Fields& whole) const;

  torch::optim::Optimizer& optimizer_;
  session::OptimizerSteps& steps_;
  const fused::Needs needs_;
  std::vector<std::vector<at::Tensor>> made_with_;  // by group; empty before the model is cut
  std::vector<std::vector<std::int64_t>> held_;     // by group, which of them are here
};

}  // namespace lamina::frontend
