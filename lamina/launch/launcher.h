// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

namespace lamina::launch {

// Runs `lamina run` with the words after it: one job on this machine, from the start of its ranks until nothing of them
// is left. Returns the exit code. Wrong input is one line on stderr and 2, a rank that the system does not let start
// one line and 127. To be called from the main thread, by a process that has no other children: it takes over this
// process's signals, and ends every child.
int run_command(const std::vector<std::string>& arguments);

}  // namespace lamina::launch
