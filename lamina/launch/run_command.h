// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

namespace lamina::launch {

// `lamina run`: takes the words after it and returns the exit code. Wrong input is one line on stderr and 2, a rank
// that the system does not let start one line and 127.
int run_command(const std::vector<std::string>& arguments);

}  // namespace lamina::launch
