// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "lamina/model/parameter_table.h"
#include "lamina/session/session.h"
#include "lamina/sharding/sharding.h"

namespace lamina::session {

// Where a run is recorded ([Note: recorded runs]), has all modules of the model recorded, before the calls go to their
// owners; else nothing.
void record_modules(Session& session, const std::vector<std::string>& names);

// Where a step begins, or the run ends: records what the model is now, this rank's part of it. Nothing where no run is
// recorded. `sharding`: of the model; nullptr where nothing is sharded.
void record_model(Session& session, const model::ParameterTable& table, sharding::Sharding* sharding);

// At the end of a step: records the gradients, and that it has ended.
void record_step(Session& session, const model::ParameterTable& table, sharding::Sharding* sharding);

}  // namespace lamina::session
