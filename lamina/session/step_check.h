// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "lamina/layout/parameter_layout.h"
#include "lamina/session/session.h"
#include "lamina/verification/plain_run.h"

namespace lamina::session {

// [Note: step check] With `verify_steps` each copy of the model is called plainly, too, in so many first steps. The
// rank that leads it, the first of a team, does so for the first microbatch, with the same arguments, values and random
// numbers. Without `prescaled_batch` a rank of a team has a copy of its own in this. The step itself is recorded by all
// ranks of the copy. At its end, before the script can update anything, the two are compared module by module and
// parameter by parameter. World rank 0 calls the model of the first step before it is cut, with values that no cut has
// touched. All others, and it in later steps, get those of all owners as they are.

// How parameters are sliced, by their names.
using Slicings = std::map<std::string, layout::Slicing>;

// Compares them; collective over the world. `plain`: on ranks that lead, where that could be run; nullptr elsewhere.
// Gradients of slices are compared as wholes. Throws base::UsageError on all ranks where the two differ.
void compare_step(Session& session, const verification::PlainRun* plain, const Slicings& slicings);

// True where the ranks that lead copies have memory for a model of so many bytes, and what it computes, beside the job.
// Collective over the world.
bool has_room_for_plain(Session& session, std::int64_t bytes);

// No more steps are compared: calls of modules have no hooks of it any more, and what was recorded is gone. Between
// steps.
void end_checks(Session& session);

}  // namespace lamina::session
