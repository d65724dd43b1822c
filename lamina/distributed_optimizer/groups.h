// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "lamina/distributed_optimizer/beside.h"
#include "lamina/distributed_optimizer/local_parameters.h"
#include "lamina/distributed_optimizer/user_optimizer.h"

namespace lamina::distributed_optimizer {

// [Note: names of parameters] In a state that goes by numbers, as torch's optimizers have it, a parameter is its
// position in the groups as they were made. In a part of a state, in checkpoints, and between ranks it is its name in
// the model; one that is not the model's goes by its place, "group:position".

// The groups of an optimizer as they were made, and what of each is here. Members that other ranks own leave them when
// the model is cut; see LocalParameters for what takes the places of the others.
class OptimizerGroups {
 public:
  // Both outlive it.
  OptimizerGroups(LocalParameters& parameters, Beside& beside) : parameters_(parameters), beside_(beside) {}

  struct Member {
    std::string name;      // see [Note: names of parameters]
    std::string given;     // the name that it was given to the optimizer with; "" for none
    at::Tensor parameter;  // the model's
    at::Tensor local;      // what stands for it here; undefined where another rank updates it
  };
  // As far as this rank knows: those of a group that each rank made of its own parameters are its own. What a program
  // has taken out of groups, put into other ones, or in another order, is so here as well. Of what another rank updates
  // it is known there alone.
  std::vector<std::vector<Member>> members(const UserOptimizer& user) const;
  // Gives the parameter of the model that a tensor is, or stands for.
  at::Tensor parameter_of(const at::Tensor& local) const;
  // False where a program has put members into groups since they were cut, or groups came.
  bool are_cut(const UserOptimizer& user) const;
  // True where other tensors than the model's parameters stand here, whether the job goes on or not.
  bool hold_others() const { return hold_others_; }
  // True where no member has left, and none is another tensor than the model's.
  bool are_whole(const UserOptimizer& user) const;

  // Makes groups this rank's part, with their part of states; what came since the last time, then. The model is cut.
  // Collective over the world where there are members that are not the model's. True where there are new ones of those.
  bool trim(UserOptimizer& user);

  // The state of what stands here for a parameter, from that of the whole.
  value::Value part_of_state(const UserOptimizer& user, const at::Tensor& local, const at::Tensor& parameter,
                             const value::Value& state) const;

  // States go to the rank's device that came before the model was there, or from a checkpoint.
  static void move_states(UserOptimizer& user);

 private:
  struct Made {
    at::Tensor parameter;
    std::string given;
  };
  at::Tensor local_of(const at::Tensor& parameter, const model::ParameterTable& table);
  // The parameter that a member stands for since groups were cut; the member itself, where that is new.
  const at::Tensor& parameter_known(const at::Tensor& local) const;
  // True of one that left the groups, because another rank updates it.
  bool is_elsewhere(const at::Tensor& parameter) const;

  LocalParameters& parameters_;
  Beside& beside_;
  std::vector<std::vector<Made>> made_with_;  // by group; empty before the model is cut
  bool hold_others_ = false;
  std::set<std::pair<std::size_t, const at::TensorImpl*>> known_;       // groups with their parameters
  std::unordered_map<const at::TensorImpl*, at::Tensor> locals_;        // undefined where another rank updates it
  std::unordered_map<const at::TensorImpl*, at::Tensor> parameter_of_;  // by what stands for it
};

// Calls `made` for each tensor of a state, however deep, that has sizes of a parameter, `like` that says, and has its
// result there.
value::Value of_each_like(const value::Value& state, const std::function<bool(at::IntArrayRef)>& like,
                          const std::function<at::Tensor(const at::Tensor&)>& made);

}  // namespace lamina::distributed_optimizer
