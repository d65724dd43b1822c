// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cerrno>
#include <string>
#include <system_error>

namespace lamina::base {

// The system's words for an errno: "No such file or directory".
inline std::string system_error(int code = errno) { return std::generic_category().message(code); }

}  // namespace lamina::base
