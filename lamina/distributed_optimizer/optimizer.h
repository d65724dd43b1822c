// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lamina/collective/ranks.h"
#include "lamina/config/config.h"
#include "lamina/data_parallel/reducer.h"
#include "lamina/distributed_optimizer/beside.h"
#include "lamina/distributed_optimizer/gradients.h"
#include "lamina/distributed_optimizer/groups.h"
#include "lamina/distributed_optimizer/local_parameters.h"
#include "lamina/distributed_optimizer/state_dicts.h"
#include "lamina/distributed_optimizer/states.h"
#include "lamina/distributed_optimizer/user_optimizer.h"
#include "lamina/optim/loss_scale.h"
#include "lamina/pipeline/backwards.h"

namespace lamina::distributed_optimizer {

// The job's model in a call, as its optimizers see it.
struct ModelInUse {
  const pipeline::Backwards* backwards = nullptr;  // nullptr: the job has no model
  data_parallel::Reducer* reducer = nullptr;       // nullptr: it has no copies
  std::int64_t steps = 0;                          // of the model that have ended here
};

// An optimizer of the job's model on one rank: what is done around its updates. A step compares options between the
// ranks that train one model, and has gradients averaged that wait for a later pass. It measures and clips them where
// something asks for that. Where gradients overflow on one rank, all ranks leave the update out. Else this rank's
// members get their gradients, the user's optimizer updates them, and all ranks get the new values.
//
// Outside of steps of the pipeline. All ranks make the same optimizers in the same order, and the same calls.
class Optimizer {
 public:
  // Collective over the world, the first time in a job: makes groups. The scale is the job's; so is the configuration,
  // which outlives it. `number`: how many optimizers the job had before. `clips_by_default`: nobody has said to which
  // norm gradients of shards are clipped.
  Optimizer(collective::Ranks ranks, const config::Config& config, std::shared_ptr<optim::LossScale> scale,
            std::int64_t number, bool clips_by_default);

  LocalParameters& parameters() { return parameters_; }
  const LocalParameters& parameters() const { return parameters_; }
  Beside& beside() { return beside_; }
  const Beside& beside() const { return beside_; }
  OptimizerGroups& groups() { return groups_; }
  const OptimizerGroups& groups() const { return groups_; }
  const States& states() const { return states_; }
  const StateDicts& state_dicts() const { return state_dicts_; }
  optim::LossScale& scale() const { return *scale_; }

  // Collective over the ranks that train one model. An empty closure: there is none. Throws base::UsageError where
  // options differ between them, and losses were not scaled that should be; before the closure is called, for one with
  // sharded parameters, whose gradients are clipped before the update.
  void step(UserOptimizer& user, const ModelInUse& model, const Closure& closure);
  // Has the next step clip to that norm of all gradients, without the loss scale. Returns the norm as it was; -1 where
  // gradients overflow, so that the step will be left out. Collective as step().
  double clip(UserOptimizer& user, const ModelInUse& model, double max_norm);
  // Forgets the gradients of all that is the model's here, or makes them zero.
  void zero_grad(UserOptimizer& user, const ModelInUse& model, bool set_to_none);
  // Gives members what was written to the parameters that they stand for.
  void follow();

  // Has the user's optimizer load what each member here has of a state, None for nothing.
  using Give = std::function<void(const std::vector<value::Value>& parts)>;
  // Loads this rank's part of a state, or with `are_parts` one that is that part already; masters, too.
  void load(UserOptimizer& user, const NamedState& state, bool are_parts, const Give& give);
  // Loads a state dict, with the loss scale; see StateDicts::found_in().
  void load(UserOptimizer& user, const StateDict& dict, const Give& give);
  // Loads one of a user's optimizer that is the whole one, by `load`, with the loss scale.
  void load_plain(const StateDict& dict, const std::function<void()>& load);

  // Is called before each update of an optimizer, with the members of groups that have their gradients; these are to be
  // multiplied by the factor. No table: the model is not cut.
  using Updated =
      std::function<void(const UserOptimizer& user, const std::vector<std::vector<OptimizerGroups::Member>>& groups,
                         const model::ParameterTable* table, double factor)>;
  void when_updated(Updated call) { updated_ = std::move(call); }
  // Has gradients clipped as those of shards are, in a job without shards, too.
  void clip_as_shards() { clips_as_shards_ = true; }

  bool overflow() const { return begun_.overflow; }  // of gradients in the last step
  double norm() const { return begun_.norm; }        // that the last step has measured; 0 where it did not

 private:
  struct Begun {
    bool overflow = false;    // the step is to be left out
    double factor = 1;        // that gradients are to be multiplied by
    double norm = 0;          // of all gradients, without the loss scale and before they are clipped; 0 if not measured
    double clipped_norm = 0;  // of what the update is given
  };
  void require_usable(const ModelInUse& model, const Closure& closure) const;
  bool is_plain(const UserOptimizer& user) const;
  void go_on_with(const StateDict& dict);
  void step_plainly(UserOptimizer& user, const ModelInUse& model, Closure closure);
  double limit(const UserOptimizer& user) const;
  std::string options(const UserOptimizer& user) const;
  std::vector<base::Rank> trained_with(const ModelInUse& model) const;
  Unscaled unscaled(const UserOptimizer& user, const ModelInUse& model) const;
  void require_scaled(Unscaled unscaled) const;
  void measure(UserOptimizer& user, const ModelInUse& model);
  void tell_of_clipping();
  void leave_out();
  void update(UserOptimizer& user);
  void update_wholes(UserOptimizer& user, const UpdateTerms& terms);

  const collective::Ranks ranks_;
  const config::Config& config_;
  const std::shared_ptr<optim::LossScale> scale_;
  const std::int64_t number_;
  LocalParameters parameters_;
  Beside beside_;
  OptimizerGroups groups_;
  States states_;
  StateDicts state_dicts_;
  Begun begun_;
  std::int64_t measured_after_ = -1;  // so many passes of the model
  std::optional<double> clip_;        // the norm that the next step clips to, where clip() has said so
  std::int64_t backwards_ = 0;        // of the model, when gradients were last forgotten
  std::int64_t plain_ = 0;            // gradients of other backwards, then: see Backwards::plain()
  std::int64_t broken_off_ = 0;       // updates that an error ended, which this rank alone may have caught
  bool tells_of_clipping_, tells_of_overflow_ = true;
  bool clips_as_shards_ = false;
  Updated updated_;
};

}  // namespace lamina::distributed_optimizer
