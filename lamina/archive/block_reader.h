// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "lamina/archive/checksums.h"

namespace lamina::archive {

// Reads of a file, ascending, which take each block from it once: of the one that a read ends in the rest is kept for
// the next. Not thread-safe.
class BlockReader {
 public:
  explicit BlockReader(CheckedInput input) : input_(std::move(input)) {}

  // Fills `to`. Throws as CheckedInput::read().
  void read(std::uint64_t offset, std::span<std::byte> to);
  // As read(), into nothing.
  void check(std::uint64_t offset, std::uint64_t size);

 private:
  std::span<const std::byte> block(std::uint64_t number);

  static constexpr auto kNone = std::numeric_limits<std::uint64_t>::max();
  CheckedInput input_;
  std::uint64_t number_ = kNone;  // of the block that is kept
  std::vector<std::byte> block_;
};

}  // namespace lamina::archive
