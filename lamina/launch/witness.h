// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "lamina/launch/options/options.h"

namespace lamina::launch {

// Is the witness of a job until that is over, or a signal ends it: see [Note: witness] in membership/witness.h. Returns
// the exit code. Throws base::ConfigError where it cannot be reached at its address here.
int run_witness(const Options& options);

}  // namespace lamina::launch
