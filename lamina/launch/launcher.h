// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "lamina/launch/options/options.h"

namespace lamina::launch {

// Runs one job on this machine, from the start of its ranks until nothing of them is left, and returns the exit code
// that `lamina run` ends with. To be called from the main thread, by a process that has no other children: it takes
// over this process's signals, and ends every child. Throws ConfigError (nothing was started) and StartError.
int launch(const Options& options);

}  // namespace lamina::launch
