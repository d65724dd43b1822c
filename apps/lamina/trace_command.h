// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

namespace lamina::command {

// Runs what follows `lamina trace`. Returns the exit code: 2 after one line on stderr that says what is wrong.
int trace(const std::vector<std::string>& arguments);

}  // namespace lamina::command
