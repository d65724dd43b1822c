// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "lamina/archive/file_system.h"
#include "lamina/archive/manifest.h"

namespace lamina::archive {

struct Damage {
  std::string file;
  std::string what;                  // a clause: "1048576 bytes at 0 are not those that were written"
  std::vector<std::string> tensors;  // that lie there
};

// Reads all of a checkpoint and says what is not as it was written, each file that does not belong there too.
// `progress` is told how many bytes of how many were read.
std::vector<Damage> verify(FileSystem& files, const Path& folder,
                           const std::function<void(std::uint64_t, std::uint64_t)>& progress);

}  // namespace lamina::archive
