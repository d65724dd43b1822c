// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

namespace lamina::command {

// Runs what follows `lamina checkpoint`. Returns the exit code: 1 where damage or a difference was found, 2 after one
// line on stderr that says what is wrong.
int checkpoint(const std::vector<std::string>& arguments);

// The folder that a user means by a path: by the file `newest` the one that it is in. Throws base::UsageError for
// another file.
std::string folder_meant(const std::string& path);

// Runs what follows `lamina checkpoint inspect`.
int inspect_checkpoint(const std::vector<std::string>& arguments);

}  // namespace lamina::command
