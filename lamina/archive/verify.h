// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "lamina/archive/checksums.h"
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

// As verify(), of a share of the blocks of a checkpoint whose manifest has been read: several readers read all of it
// together. `was_read` is told of bytes that were read.
std::vector<Damage> verify_share(FileSystem& files, const Path& folder, const Manifest& manifest, const Share& share,
                                 const std::function<void(std::uint64_t)>& was_read);

}  // namespace lamina::archive
