// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "lamina/distributed_optimizer/beside.h"
#include "lamina/distributed_optimizer/gradients.h"
#include "lamina/distributed_optimizer/holders.h"
#include "lamina/distributed_optimizer/owners.h"
#include "lamina/distributed_optimizer/stand_ins.h"
#include "lamina/optim/loss_scale.h"
#include "lamina/optim/step.h"
#include "lamina/session/session.h"

namespace lamina::session {

constexpr double kNoClipping = std::numeric_limits<double>::infinity();

// An optimizer of a model's parameters on one rank: what stands in its groups for them, see [Note: stand-ins], and what
// is done around its steps. Outside of steps of the pipeline; all ranks do the same.
class OptimizerSteps {
 public:
  using Table = std::function<const model::ParameterTable*()>;

  // Collective over the world, the first time: makes groups. The scale is the job's.
  OptimizerSteps(Session& session, std::shared_ptr<optim::LossScale> scale);

  // When the model is cut. `table` gives nullptr where there is none; so may be the sharding.
  void set_model(Table table, std::shared_ptr<sharding::Sharding> sharding);
  // Gives what an optimizer is to have in the place of a parameter of the model, or of this rank's shard: a stand-in,
  // or itself, as any other tensor.
  at::Tensor place_of(const at::Tensor& held);
  distributed_optimizer::StandIns& stand_ins() { return stand_ins_; }
  // True of a parameter that is not the model's, nor stands for one: see [Note: beside the model].
  bool is_beside(const at::Tensor& held) const;
  // Collective over the world: gives parameters that are new here the values of its first rank.
  void take_beside(std::span<const at::Tensor> parameters);
  const std::vector<at::Tensor>& beside() const { return beside_; }
  bool updates_beside() const { return session_.members(topology::Group::kPp).front() == session_.world().rank; }
  // Collective over the pipeline where there are any: gives them the values that an update has given those of the rank
  // that leads. Part of end().
  void bring_beside() const;
  // True where groups hold other tensors than the model's parameters, on this or on another rank.
  bool replaces() const;
  // Says what a tensor of the groups is a part of; none for what is whole here. See [Note: parts].
  std::optional<distributed_optimizer::Part> part(const at::Tensor& place) const;
  bool is_master(const at::Tensor& place) const;
  // The elements of the parameter that a part has, flattened: first, and one past the last.
  std::pair<std::int64_t, std::int64_t> range(const distributed_optimizer::Part& part) const {
    return holders_->range(part.parameter);
  }
  // Those who hold the parts: the sharding group, or the copies of the model; none where all is whole.
  std::optional<topology::Group> divided_over() const;
  std::vector<base::Rank> members(topology::Group group) const { return session_.members(group); }

  struct Begun {
    bool overflow = false;    // the step is to be left out
    double factor = 1;        // that gradients are to be multiplied by
    double norm = 0;          // of all gradients, without the loss scale and before they are clipped; 0 if not measured
    double clipped_norm = 0;  // of what the update is given
  };
  // Measures where something asks for it, and clips to the norm `max_norm`. `places`: all that the groups hold.
  // Collective, then, over the pipeline, the sharding group and, with_copies, those of the model. Valid until gradients
  // change. Requires `options` to be alike, too.
  Begun begin(std::span<const at::Tensor> places, double max_norm, bool with_copies, const std::string& options);
  // Throws base::UsageError, on all, where options differ between ranks that train one model: see [Note: options].
  // Collective over these.
  void require_alike(const std::string& options, bool with_copies) const;
  // The step is left out.
  void leave_out();
  // Gives each place its gradient, until end(); `as_is`, where whoever updates multiplies them itself, and gives halves
  // their values.
  void give_gradients(std::span<const at::Tensor> places, const Begun& begun, bool as_is);
  // As optim::step_groups(), of what stands in groups, as it is: what is measured of parts is combined, collectively
  // over the holders, and halves get the values of their masters.
  void update(const optim::Functional& functional, std::span<optim::GroupStep> groups, optim::Threads& threads) const;
  // All places are updated: so are the parameters, on all ranks.
  void end(bool as_is);

  // For an optimizer that needs all of a parameter, between give_gradients() and end(): see [Note: owners]. All call
  // spread_wholes() when its groups have new places, then around each update what is collective over the holders:
  // begin_wholes() says what each place is in the update, end_wholes() gives all parts their values.
  void spread_wholes(std::span<const at::Tensor> places);
  bool updates_whole(const at::Tensor& place) const;  // of which that is this rank's part
  std::vector<at::Tensor> begin_wholes(std::span<const at::Tensor> places);
  void end_wholes();
  void forget_wholes();  // of an update that failed

  // This rank's part of a state like a parameter, and all of it from the parts: collective over the holders.
  at::Tensor part_of(const at::Tensor& place, const at::Tensor& whole) const;
  at::Tensor whole_of(const at::Tensor& place, const at::Tensor& value) const;

 private:
  void hold_in(collective::Group& group);
  void give_back_gradients();
  std::vector<base::Rank> trained_with(bool copies) const;
  bool divides(const at::Tensor& held) const;

  Session& session_;
  const std::shared_ptr<optim::LossScale> scale_;
  std::unique_ptr<distributed_optimizer::Holders> holders_;  // none where every parameter is whole
  std::optional<distributed_optimizer::Owners> owners_;
  Table table_ = [] { return nullptr; };
  std::shared_ptr<sharding::Sharding> sharding_;
  distributed_optimizer::StandIns stand_ins_;
  std::vector<at::Tensor> beside_;
  std::vector<std::pair<at::Tensor, double>> multiplied_;  // in a step: gradients in their own memory, by how much
};

}  // namespace lamina::session
