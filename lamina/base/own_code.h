// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

namespace lamina::base {

// Others who must not be able to write to a place of code.
enum class Writers {
  kAnybody,  // all users
  kGroup,    // a group as well, and an owner other than root, this process's user, and whoever owns this code
};

// Refuses code that others may have put there, as sshd refuses their keys: the file or folder, all folders above it,
// and what links on the way lead through must not be open to `writers`. A folder in which a user may rename and remove
// his own files only, such as /tmp, may hold such a folder.
//
// variable: of the environment, which names it; for the error.
// Throws ConfigError with the code start-others-code. What is not there is for the caller to find.
void require_own_code(const std::string& path, const std::string& variable, Writers writers);

}  // namespace lamina::base
