// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

namespace lamina::command {

// Runs a Python program that this command has in itself, in the place of this process. Returns only where there is no
// interpreter: an exit code, after a line that begins with `name`.
int become_script(const std::string& name, const char* script, const std::vector<std::string>& words);

}  // namespace lamina::command
