// SPDX-License-Identifier: Apache-2.0
#include "lamina/archive/extra_files.h"

#include <algorithm>
#include <set>

#include "lamina/archive/checksums.h"
#include "lamina/archive/whole_model.h"

namespace lamina::archive {

std::vector<DataFile> copy_extra_files(FileSystem& files, const Found& from, const Path& to) {
  std::set<std::size_t> with_tensors;
  for (const auto& tensor : from.manifest.tensors) {
    for (const auto& piece : tensor.pieces) with_tensors.insert(piece.file);
  }
  std::vector<DataFile> copied;
  std::vector<std::byte> part(kBlock);
  for (std::size_t i = 0; i < from.manifest.files.size(); ++i) {
    const auto& file = from.manifest.files[i];
    if (with_tensors.contains(i) || file.name.ends_with(".safetensors") || file.name == kModelIndex) continue;
    CheckedInput input(files.open(from.folder / file.name), (from.folder / file.name).string(), file.bytes,
                       file.checksums);
    CheckedOutput output(files.create(to / file.name));
    for (std::uint64_t at = 0; at < file.bytes; at += kBlock) {
      const auto bytes = std::span(part).first(std::min(kBlock, file.bytes - at));
      input.read(at, bytes);
      output.write(bytes);
    }
    output.finish();
    copied.push_back({file.name, output.size(), output.checksums()});
  }
  return copied;
}

}  // namespace lamina::archive
