// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>
#include <memory>
#include <span>
#include <vector>

#include "lamina/archive/block_reader.h"
#include "lamina/archive/file_system.h"
#include "lamina/archive/manifest.h"

namespace lamina::archive {

// Elements that are read at once where a tensor goes by in parts: no more than stays in a processor's cache.
inline constexpr std::uint64_t kPartBytes = std::uint64_t{1} << 20;

inline std::uint64_t element_bytes(layout::DType dtype) { return static_cast<std::uint64_t>(traits(dtype).size_bytes); }
inline std::uint64_t bytes_of(const SavedTensor& tensor) {
  return static_cast<std::uint64_t>(layout::numel(tensor.shape)) * element_bytes(tensor.dtype);
}

// Reads tensors of a checkpoint out of the pieces in which they lie. Not thread-safe.
class TensorReader {
 public:
  // Both outlive it.
  TensorReader(FileSystem& files, Path folder, const Manifest& manifest);

  // Fills `to` with elements from `begin` on, as they follow each other in the tensor. Throws base::FormatError, which
  // names file and tensor, where bytes are not those that were written, or elements are in no piece.
  void read(const SavedTensor& tensor, std::int64_t begin, std::span<std::byte> to);

  // All elements in their order, in parts of kPartBytes at most: calls taken(begin, bytes) for each.
  template <class Taken>
  void read_parts(const SavedTensor& tensor, const Taken& taken) {
    const auto size = element_bytes(tensor.dtype), all = bytes_of(tensor), most = kPartBytes / size * size;
    for (std::uint64_t at = 0; at < all; at += most) {
      part_.resize(std::min(most, all - at));
      read(tensor, static_cast<std::int64_t>(at / size), part_);
      taken(static_cast<std::int64_t>(at / size), std::span(part_));
    }
  }

 private:
  BlockReader& open(std::size_t file);

  FileSystem& files_;
  const Path folder_;
  const Manifest& manifest_;
  std::map<std::size_t, BlockReader> open_;  // the last ones that were read
  std::vector<std::byte> part_;
};

}  // namespace lamina::archive
