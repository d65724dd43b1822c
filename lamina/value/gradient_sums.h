// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace lamina::value {

// [Note: gradient sums] Torch adds a gradient of another rank's in place to one that is here, if nobody else holds that
// at the moment, and so waits for the number. Else it makes a sum, which may wait later: see Sum. When others let go of
// a gradient, as whoever sends it, depends on times. So a thread whose waits are to be alike on several ranks, see
// [Note: turns of a team], waits in both cases.
using WaitsAlike = bool (*)();
void set_waits_alike(WaitsAlike waits);  // says it of the thread that asks

}  // namespace lamina::value
