// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "lamina/archive/file_system.h"

namespace lamina::foreign {

// Bytes of a file.
struct Extent {
  std::uint64_t begin = 0;
  std::uint64_t size = 0;
};

struct ZipMember : Extent {
  std::uint32_t crc = 0;  // as the archive says
};

// The files of a zip archive, none of them compressed, as torch writes one (PKWARE's APPNOTE, with its 64-bit
// extensions): where the bytes of each lie. `within` is the archive's place in the file. Any bytes are safe. Throws
// base::FormatError unless they are such an archive.
std::map<std::string, ZipMember> read_zip(const archive::FileSystem::Input& file, Extent within);

// True where a file of an archive has the checksum that the archive says.
bool is_undamaged(const archive::FileSystem::Input& file, const ZipMember& member);

}  // namespace lamina::foreign
