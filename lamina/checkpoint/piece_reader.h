// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <tuple>
#include <vector>

#include "lamina/archive/block_reader.h"
#include "lamina/archive/manifest.h"
#include "lamina/layout/region.h"

namespace lamina::checkpoint {

// Elements of a saved tensor that a rank wants.
struct Wanted {
  const archive::SavedTensor* tensor = nullptr;
  layout::Region region;
  // Memory of the host, contiguous, of the tensor's dtype: region.size elements, of which padding is left alone.
  at::Tensor into;
};

// A checkpoint that is read: of its files no more than the blocks in which something wanted lies, each once.
class PieceReader {
 public:
  // Throws base::FormatError where a file is not there or has another size. Without `verify`, or where the manifest has
  // no checksums, nothing that is read is checked.
  PieceReader(archive::FileSystem& files, archive::Path folder, archive::Manifest manifest, bool verify);

  const archive::Manifest& manifest() const { return manifest_; }
  const archive::Path& folder() const { return folder_; }
  // nullptr where there is none. A parameter may have been a buffer, and the other way round.
  const archive::SavedTensor* find(const std::string& name, archive::Kind kind, int optimizer = 0,
                                   const std::string& state = "") const;

  // Throws base::FormatError, which names file and tensor, for what is not as it was written. `went_on` is called now
  // and then, and may throw.
  void read(std::span<const Wanted> wanted, const std::function<void()>& went_on) const;
  // As read(), into nothing, for what is to be read later; does nothing where nothing is checked.
  void check(std::span<const Wanted> wanted, const std::function<void()>& went_on) const;
  // Throws as read() for a share of all files, of which nothing is kept; as check().
  void check(const archive::Share& share, const std::function<void()>& went_on) const;
  // All of a tensor.
  at::Tensor read(const archive::SavedTensor& tensor) const;

 private:
  using Key = std::tuple<std::string, archive::Kind, int, std::string>;
  struct Run;
  class OpenFile;
  // `take`: called with the reader of a file and a Run, by files, ascending.
  template <class Take>
  void for_each_run(std::span<const Wanted> wanted, const std::function<void()>& went_on, const Take& take) const;

  archive::FileSystem& files_;
  const archive::Path folder_;
  const archive::Manifest manifest_;
  const bool verify_;
  std::map<Key, const archive::SavedTensor*> by_key_;
};

}  // namespace lamina::checkpoint
