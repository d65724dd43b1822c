// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <span>

#include "lamina/model/parameter_table.h"
#include "lamina/model/values.h"
#include "lamina/session/session.h"
#include "lamina/sharding/sharding.h"

namespace lamina::session {

// Has the ranks of a sharding group without common memory, and those that have slices of the same layers, take their
// turns in steps in one order, where there are partitions. Collective over these ranks, when a model is made that has
// these parameters.
void order_turns(Session& session, std::span<const at::Tensor> parameters);

// True where ranks whose batches differ may have to call the same modules in a step: they have as many microbatches.
bool needs_all_microbatches(const Session& session);

// Gives the ranks of a model the values that world rank 0 has, or their shards of them; collective over the world. See
// model::give_values(). `modules`: the names of those that are called with their values. Returns the sharding; nullptr
// where nothing is to be sharded.
std::shared_ptr<sharding::Sharding> give_values(Session& session, const model::ParameterTable& table,
                                                std::span<const std::string> modules, model::ValueHooks hooks,
                                                std::size_t portion_bytes);

}  // namespace lamina::session
