// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <vector>

#include "lamina/messaging/same_arguments.h"
#include "lamina/model/cut.h"
#include "lamina/model/parameter_table.h"
#include "lamina/model/values.h"
#include "lamina/session/session.h"
#include "lamina/sharding/sharding.h"

namespace lamina::session {

// [Note: life of a model] A model is whole on every rank until the job cuts it. The steps of that stand in
// begin_life(), in the one order that both faces have; a face lends what only it can do. Each relies on those before:
//
//   arguments            all ranks have made it with the same ones
//   propose, take_cut    all ranks have built the same model, and have the first one's plan of who owns what
//   table, take_values   each rank has the values of what the table says it holds, and no others
//   trim_optimizers      groups have what is updated here, with the states that were loaded into them
//   watch                backwards into the parameters are noticed; torch's functions know of parts
//   route                calls go to the owners
//   load                 states and the checkpoint that came before the cut
//   settle               statistics and orders are those of the values that are there now, in this and in each step
//
// An error of one rank in `trim_optimizers` is one of all. Values have gone then: each later cut throws it again. An
// error in `load` leaves a model that is cut, has its own values, and can be trained or loaded again.
class ModelFace {
 public:
  virtual ~ModelFace() = default;

  // Lists those that are to be alike on all ranks.
  virtual std::vector<messaging::Argument> arguments() const = 0;
  // Fills the tree and, on world rank 0, plans.
  virtual model::Proposal propose() = 0;
  virtual const model::ModuleTree& tree() const = 0;
  virtual void take_cut(const model::Agreed& agreed) = 0;
  virtual const model::ParameterTable& table() = 0;
  virtual model::ValueHooks value_hooks() = 0;
  // True where no rank has values yet: load() brings them.
  virtual bool values_follow() const { return false; }
  virtual std::size_t portion_bytes() const { return model::kPortionBytes; }
  // nullptr: nothing is sharded.
  virtual void take_values(std::shared_ptr<sharding::Sharding> sharding) = 0;
  virtual void trim_optimizers() = 0;
  virtual void watch() = 0;
  virtual void route() = 0;
  virtual void load() = 0;
  virtual void settle() = 0;
};

// Cuts a model; collective over the world. Throws base::UsageError where arguments differ, as model::agree_on_cut() and
// give_values() do, and what the face throws.
void begin_life(Session& session, ModelFace& face);

}  // namespace lamina::session
