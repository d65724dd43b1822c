// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>

#include "lamina/checkpoint/save.h"
#include "lamina/value/value.h"

namespace lamina::job_checkpoint {

// Acts on this rank, as all ranks do; then throws what failed on one of them, the first, on all. Collective over the
// world.
void together(const checkpoint::Peers& peers, const std::function<void()>& act);

// Returns on every rank what the first one makes, or throws what it throws. Collective over the world.
value::Value from_first(const checkpoint::Peers& peers, const std::function<value::Value()>& make);

}  // namespace lamina::job_checkpoint
