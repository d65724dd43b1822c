// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "lamina/model/cut.h"
#include "lamina/model/module_tree.h"
#include "lamina/model/parameter_table.h"
#include "lamina/model/values.h"
#include "lamina/session/session.h"
#include "lamina/sharding/sharding.h"

namespace lamina::session {

// Has the ranks of a sharding group without common memory, and those that have slices of the same layers, take their
// turns in steps in one order, where there are partitions. Collective over these ranks, when a model is made.
void order_turns(Session& session);

// Names the modules here for whose calls values come and go. Of those that `sdp_units` lists, or that are called, the
// innermost has a parameter. What is in none of these is had by the outermost one that other ranks call. Throws
// base::ConfigError for a name that is no module's.
std::vector<std::string> units_of(const config::Config& config, const model::ModuleTree& tree, const model::Cut& cut);

// Throws base::ConfigError for an entry of `sdp_persistent_parameters` that names nothing of a model.
void require_persistent(const config::Config& config, const model::ModuleTree& tree);

// Gives the ranks of a model the values that world rank 0 has, or their shards of them; collective over the world. See
// model::give_values(). `units`: as units_of() names them. Returns the sharding; nullptr
// where nothing is to be sharded. Where values follow there is memory for them afterwards, and nobody gives any.
std::shared_ptr<sharding::Sharding> give_values(Session& session, const model::ParameterTable& table,
                                                std::span<const std::string> units, model::ValueHooks hooks,
                                                std::size_t portion_bytes, bool values_follow);

}  // namespace lamina::session
