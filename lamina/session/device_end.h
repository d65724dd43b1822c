// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "lamina/session/session.h"

namespace lamina::session {

// Waits for what the rank's device has still to compute, collectives with the other ranks above all: before groups are
// given up. Groups::lose() ends those that wait for a lost rank. Throws what Session::patience() throws.
void await_device(const Session& session);

}  // namespace lamina::session
