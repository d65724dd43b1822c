// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <map>
#include <span>
#include <unordered_set>
#include <vector>

#include "lamina/archive/checksums.h"
#include "lamina/archive/file_system.h"
#include "lamina/archive/manifest.h"

namespace lamina::archive {

// Elements that are read at once where a tensor goes by in parts: no more than stays in a processor's cache.
inline constexpr std::uint64_t kPartBytes = std::uint64_t{1} << 20;

inline std::uint64_t element_bytes(layout::DType dtype) { return static_cast<std::uint64_t>(traits(dtype).size_bytes); }
inline std::uint64_t bytes_of(const SavedTensor& tensor) {
  return static_cast<std::uint64_t>(layout::numel(tensor.shape)) * element_bytes(tensor.dtype);
}

// Elements of a saved tensor that somebody wants, and memory for region.size of them, of which padding is left alone.
// A check needs no memory.
struct Wanted {
  const SavedTensor* tensor = nullptr;
  layout::Region region;
  std::span<std::byte> into;
};

// Gives elements of saved tensors out of the pieces in which they lie, wherever that is.
class PieceSource {
 public:
  using WentOn = std::function<void()>;  // called now and then; may throw

  virtual ~PieceSource() = default;

  virtual void read(std::span<const Wanted> wanted, const WentOn& went_on) = 0;
  // As read(), into nothing, for what is to be read later.
  virtual void check(std::span<const Wanted> wanted, const WentOn& went_on) = 0;
  // True where all ranks read at the same time, each as often.
  virtual bool is_collective() const { return false; }
};

// Reads tensors of a checkpoint out of the pieces in which they lie. Of its files it reads the blocks that hold
// something wanted, each once. Not thread-safe.
//
// Its calls throw base::FormatError, which names file and tensor, where bytes are not those that were written or the
// pieces of a tensor have not each element once.
class PieceReader : public PieceSource {
 public:
  // `files` and `manifest` outlive it. Without `verify`, or where the manifest has no checksums, nothing is compared.
  PieceReader(FileSystem& files, Path folder, const Manifest& manifest, bool verify = true)
      : files_(files), folder_(std::move(folder)), manifest_(manifest), verify_(verify) {}

  void read(std::span<const Wanted> wanted, const WentOn& went_on) override;
  // Does nothing where nothing is compared.
  void check(std::span<const Wanted> wanted, const WentOn& went_on) override;
  // As check(), of a share of all files.
  void check(const Share& share, const WentOn& went_on);

  // Fills `to` with elements from `begin` on, as they follow each other in the tensor.
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
  struct Run;
  // Calls take(reader of a file, run) for all that is wanted, by files, of which at most so many stay open.
  template <class Take>
  void for_each_run(std::span<const Wanted> wanted, std::size_t most_open, const WentOn& went_on, const Take& take);
  CheckedInput& open(std::size_t file, std::size_t most_open);

  FileSystem& files_;
  const Path folder_;
  const Manifest& manifest_;
  const bool verify_;
  std::map<std::size_t, CheckedInput> open_;        // the last files that were read
  std::unordered_set<const SavedTensor*> checked_;  // tensors whose pieces have each element once
  std::vector<std::byte> part_;
};

}  // namespace lamina::archive
