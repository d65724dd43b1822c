// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <string>

#include "lamina/environment/world.h"

namespace lamina::dist {

int value_in(const environment::World& world, const std::string& name);  // its RANK, WORLD_SIZE, ...

// Returns what the environment says of RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE or NODE_RANK: that variable, also
// where the others are missing, else the launcher in its own words (environment/world.h); nothing when nobody tells.
// Throws base::ConfigError for what is no number.
std::optional<int> told(const std::string& name, const environment::Environment& environment);

// This process in the world that initialize_dist makes: as read_world, and alone where WORLD_SIZE is 1 and the rest
// need not be complete.
environment::World world_to_meet(const environment::Environment& environment);

}  // namespace lamina::dist
