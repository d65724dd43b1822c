// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "lamina/session/session.h"
#include "lamina/verification/plain_run.h"

namespace lamina::session {

// [Note: step check] With `verify_steps` the first rank of the world runs the first microbatch of the first step on the
// model before that is cut: with the same arguments, values and random numbers. The step itself is recorded by all
// ranks of that copy of the model. At its end, before the script can update anything, the two are compared module by
// module.

// Compares them; collective over the world. `plain`: on the first rank, where that could be run; nullptr elsewhere.
// Throws base::UsageError on all ranks where they differ.
void compare_step(Session& session, const verification::PlainRun* plain);

}  // namespace lamina::session
