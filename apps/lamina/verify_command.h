// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

namespace lamina::command {

// Runs `lamina verify` with the words after it: a script's first steps in its layout, and without it, and what the two
// runs have and have not in common. Returns the exit code: 0 where they are equal, 3 where they differ, 2 for wrong
// input, and that of a run that failed.
int verify(const std::vector<std::string>& arguments);

}  // namespace lamina::command
