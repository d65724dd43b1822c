// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cerrno>
#include <cstdint>
#include <optional>

#include "lamina/archive/file_system.h"
#include "lamina/base/error.h"
#include "lamina/base/str.h"
#include "lamina/base/system_error.h"

namespace lamina::archive {

// The error of a call that the system refused: "writing /a/b: No space left on device (4096 bytes to write, 512 bytes
// are free)". Where space is missing it says how much was `needed`, if anything was to be written, and how much is
// there.
inline base::FileError file_failure(const char* doing, const Path& path, int code, std::uint64_t needed = 0,
                                    std::optional<std::uint64_t> free = {}) {
  std::string space;
  if (code == ENOSPC || code == EDQUOT) {
    if (needed > 0) space = base::str(needed, " bytes to write");
    if (free) space += base::str(space.empty() ? "" : ", ", *free, " bytes are free");
    if (code == EDQUOT) space += base::str(space.empty() ? "" : "; ", "the quota of this user is used up");
  }
  return {base::str(doing, " ", path.string(), ": ", base::system_error(code), space.empty() ? "" : " (", space,
                    space.empty() ? "" : ")"),
          code};
}

}  // namespace lamina::archive
