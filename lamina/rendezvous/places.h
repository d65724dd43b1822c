// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include "lamina/environment/world.h"

namespace lamina::rendezvous {

// The world with the places of its ranks. Ranks of one machine have one text; a rank with "" is alone.
environment::World placed_by(environment::World world, const std::vector<std::string>& machines);

// The world, whose ranks tell each other at the job's store where they are ([Note: place]) where no launcher has said
// so
// (`local_size` is 0); collective then, and once more each time. Throws as join() does.
environment::World placed(environment::World world, const std::function<void()>& check_interrupt,
                          std::chrono::milliseconds timeout = std::chrono::minutes(5));

}  // namespace lamina::rendezvous
