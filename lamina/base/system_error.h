// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cerrno>
#include <string>
#include <system_error>

namespace lamina::base {

// The system's words for an errno: "No such file or directory"; and the remedy where it is always the same.
inline std::string system_error(int code = errno) {
  const std::string words = std::generic_category().message(code);
  return code == EMFILE ? words + " (`ulimit -n` raises the limit)" : words;
}

}  // namespace lamina::base
