// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "lamina/archive/file_system.h"

namespace lamina::archive {

// The bytes of a file that one checksum is of, the last one of less: who reads a part of it checks the blocks that it
// touches.
inline constexpr std::uint64_t kBlock = std::uint64_t{1} << 20;

using Checksum = std::uint64_t;  // XXH3, 64 bits

// One of so many equal parts of the blocks of each file.
struct Share {
  std::uint64_t index = 0, of = 1;
};

Checksum checksum(std::span<const std::byte> bytes);

// Sixteen digits each.
std::string to_hex(std::span<const Checksum> checksums);
// Throws base::FormatError for anything that to_hex() did not make.
std::vector<Checksum> from_hex(std::string_view text);

// A file that is written, and the checksums of its blocks.
class CheckedOutput {
 public:
  explicit CheckedOutput(std::unique_ptr<FileSystem::Output> file);
  ~CheckedOutput();

  void write(std::span<const std::byte> bytes);
  // Nothing comes any more: the bytes are on the disk.
  void finish();

  std::uint64_t size() const { return size_; }
  const std::vector<Checksum>& checksums() const { return checksums_; }  // after finish()

 private:
  struct Running;
  const std::unique_ptr<FileSystem::Output> file_;
  const std::unique_ptr<Running> running_;  // of the block that is not whole yet
  std::uint64_t size_ = 0;
  std::vector<Checksum> checksums_;
};

// A file whose size and checksums are known: what is read of it is what was written. Without checksums, which a file of
// others may lack, only the size is known. Ascending reads take each block from it once: of the one that a read ends in
// the rest is kept for the next. Not thread-safe.
class CheckedInput {
 public:
  // `name`: of the file, for errors. Throws base::FormatError where the file has another size.
  CheckedInput(std::unique_ptr<FileSystem::Input> file, std::string name, std::uint64_t size,
               std::vector<Checksum> checksums);

  // Fills `to`. Reads the blocks that it touches whole, and throws base::FormatError where one is not what was written,
  // or not there.
  void read(std::uint64_t offset, std::span<std::byte> to);
  // As read(), into nothing.
  void check(std::uint64_t offset, std::uint64_t size);
  // The blocks of a share, by number, that are not what was written. `read_bytes` is told of each block's size when it
  // was read.
  template <class Told>
  std::vector<std::uint64_t> damaged(const Share& share, const Told& read_bytes) const {
    std::vector<std::uint64_t> found;
    std::vector<std::byte> block(kBlock);
    const auto first = [&](std::uint64_t index) { return checksums_.size() * index / share.of; };
    for (auto number = first(share.index); number < first(share.index + 1); ++number) {
      const auto bytes = std::span(block).first(block_size(number));
      if (!holds(number, bytes)) found.push_back(number);
      read_bytes(bytes.size());
    }
    return found;
  }

 private:
  void require(std::uint64_t offset, std::uint64_t size) const;
  std::uint64_t block_size(std::uint64_t number) const { return std::min(kBlock, size_ - number * kBlock); }
  bool holds(std::uint64_t number, std::span<std::byte> bytes) const;  // which it reads
  void take(std::uint64_t number, std::span<std::byte> bytes) const;
  std::span<const std::byte> block(std::uint64_t number);

  static constexpr auto kNone = ~std::uint64_t{0};
  std::unique_ptr<FileSystem::Input> file_;
  std::string name_;
  std::uint64_t size_;
  std::vector<Checksum> checksums_;
  std::uint64_t number_ = kNone;  // of the block that is kept
  std::vector<std::byte> block_;
};

}  // namespace lamina::archive
