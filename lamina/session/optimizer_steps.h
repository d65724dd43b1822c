// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <limits>
#include <memory>
#include <optional>
#include <span>

#include "lamina/distributed_optimizer/division.h"
#include "lamina/distributed_optimizer/gradients.h"
#include "lamina/distributed_optimizer/stand_ins.h"
#include "lamina/optim/loss_scale.h"
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
  // Gives what an optimizer is to have in the place of a parameter, or of this rank's shard: a stand-in, or itself.
  at::Tensor place_of(const at::Tensor& held);
  distributed_optimizer::StandIns& stand_ins() { return stand_ins_; }

  struct Begun {
    bool overflow = false;    // the step is to be left out
    double factor = 1;        // that gradients are to be multiplied by
    double norm = 0;          // of all gradients, without the loss scale and before they are clipped; 0 if not measured
    double clipped_norm = 0;  // of what the update is given
  };
  // Measures where something asks for it, and clips to the norm `max_norm`. `places`: all that the groups hold.
  // Collective, then, over the pipeline, the sharding group and, with_copies, those of the model. Valid until gradients
  // change.
  Begun begin(std::span<const at::Tensor> places, double max_norm, bool with_copies);
  // The step is left out.
  void leave_out();
  // Gives each place its gradient; `as_is`, where whoever updates multiplies them itself, and gives halves their
  // values.
  void give_gradients(std::span<const at::Tensor> places, const Begun& begun, bool as_is);
  // All places are updated: so are the parameters, on all ranks.
  void end(bool as_is);

  // This rank's part of a state like a parameter, and all of it from the parts, of all ranks that divide it: collective
  // over them.
  at::Tensor part_of(const at::Tensor& place, const at::Tensor& whole) const;
  at::Tensor whole_of(const at::Tensor& place, const at::Tensor& part) const;

 private:
  Session& session_;
  const std::shared_ptr<optim::LossScale> scale_;
  std::optional<distributed_optimizer::Division> division_;
  Table table_ = [] { return nullptr; };
  std::shared_ptr<sharding::Sharding> sharding_;
  distributed_optimizer::StandIns stand_ins_;
};

}  // namespace lamina::session
