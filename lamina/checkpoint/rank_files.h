// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <string>

#include "lamina/archive/file_system.h"
#include "lamina/archive/manifest.h"
#include "lamina/checkpoint/part.h"

namespace lamina::checkpoint {

inline constexpr std::int64_t kMostFileBytes = std::int64_t{5'000'000'000};

// Writes this rank's parts into files of their own, whose names have its number: parameters and buffers, masters and
// states, the rest. Each part is in one file, which is larger than kMostFileBytes only for a single part. All is on the
// disk when this returns. `wrote` is told of bytes as they are written, and may throw, which ends it.
//
// Returns the manifest of these files alone.
archive::Manifest write_rank_files(archive::FileSystem& files, const archive::Path& folder, std::size_t rank,
                                   std::span<const Part> parts, const std::function<void(std::int64_t)>& wrote);

// A file of this rank's that somebody else makes the bytes of.
struct OwnFile {
  using Write = std::function<void(std::span<const std::byte>)>;  // what follows in the file; may throw

  std::string name;                        // in the checkpoint's folder; no other rank has it
  std::int64_t bytes = 0;                  // about how many
  std::function<void(const Write&)> make;  // called once, by the thread that writes; lets through what `Write` throws
};

// Writes it. All is on the disk when this returns. `wrote` is told as above.
archive::DataFile write_own_file(archive::FileSystem& files, const archive::Path& folder, const OwnFile& file,
                                 const std::function<void(std::int64_t)>& wrote);

// Writes one more file, of text. Returns the manifest of it alone.
archive::Manifest write_text(archive::FileSystem& files, const archive::Path& folder, const std::string& name,
                             const std::string& text);

// The name of a part in its file: that of the tensor where it is whole, so that others who read such files find it.
std::string entry_name(const Part& part);

// Makes one manifest of several ranks'. Throws base::InternalError where elements are missing, or there twice.
archive::Manifest merge(std::span<const archive::Manifest> manifests);

}  // namespace lamina::checkpoint
