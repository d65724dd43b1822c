// SPDX-License-Identifier: Apache-2.0
#include "lamina/archive/checksums.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <charconv>
#include <cstring>

#include "lamina/base/error.h"
#include "lamina/base/str.h"

namespace lamina::archive {
namespace {

constexpr std::size_t kDigits = 16;

}  // namespace

Checksum checksum(std::span<const std::byte> bytes) { return XXH3_64bits(bytes.data(), bytes.size()); }

std::string to_hex(std::span<const Checksum> checksums) {
  constexpr auto* kHex = "0123456789abcdef";
  std::string text;
  text.reserve(checksums.size() * kDigits);
  for (const auto each : checksums) {
    for (int shift = 60; shift >= 0; shift -= 4) text.push_back(kHex[each >> shift & 15]);
  }
  return text;
}

std::vector<Checksum> from_hex(std::string_view text) {
  std::vector<Checksum> checksums;
  checksums.reserve(text.size() / kDigits);
  for (; !text.empty(); text.remove_prefix(std::min(text.size(), kDigits))) {
    const auto digits = text.substr(0, kDigits);
    Checksum value = 0;
    const auto read = std::from_chars(digits.data(), digits.data() + digits.size(), value, 16);
    if (digits.size() != kDigits || read.ptr != digits.data() + digits.size() || to_hex({{value}}) != digits) {
      throw base::FormatError(base::str("\"", digits, "\" is no checksum"));
    }
    checksums.push_back(value);
  }
  return checksums;
}

struct CheckedOutput::Running {
  XXH3_state_t state{};
};

CheckedOutput::CheckedOutput(std::unique_ptr<FileSystem::Output> file)
    : file_(std::move(file)), running_(std::make_unique<Running>()) {
  XXH3_64bits_reset(&running_->state);
}
CheckedOutput::~CheckedOutput() = default;

void CheckedOutput::write(std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const auto part = bytes.first(std::min<std::uint64_t>(bytes.size(), kBlock - size_ % kBlock));
    XXH3_64bits_update(&running_->state, part.data(), part.size());
    file_->write(part);
    size_ += part.size();
    if (size_ % kBlock == 0) {
      checksums_.push_back(XXH3_64bits_digest(&running_->state));
      XXH3_64bits_reset(&running_->state);
    }
    bytes = bytes.subspan(part.size());
  }
}

void CheckedOutput::finish() {
  if (size_ % kBlock != 0) checksums_.push_back(XXH3_64bits_digest(&running_->state));
  file_->sync();
}

CheckedInput::CheckedInput(std::unique_ptr<FileSystem::Input> file, std::string name, std::uint64_t size,
                           std::vector<Checksum> checksums)
    : file_(std::move(file)), name_(std::move(name)), size_(size), checksums_(std::move(checksums)) {
  if (file_->size() != size_) {
    throw base::FormatError(base::str(name_, ": ", file_->size(), " bytes, where ", size_, " were written"));
  }
}

bool CheckedInput::holds(std::uint64_t number, std::span<std::byte> bytes) const {
  file_->read(number * kBlock, bytes);
  return checksums_.empty() || checksum(bytes) == checksums_[number];
}

void CheckedInput::require(std::uint64_t offset, std::uint64_t size) const {
  if (offset <= size_ && size <= size_ - offset) return;
  throw base::FormatError(base::str(name_, ": ", size, " bytes at ", offset, " are not in its ", size_));
}

void CheckedInput::take(std::uint64_t number, std::span<std::byte> bytes) const {
  if (holds(number, bytes)) return;
  throw base::FormatError(base::str(name_, ": the ", bytes.size(), " bytes at ", number * kBlock,
                                    " are not those that were written: the file is damaged"));
}

std::span<const std::byte> CheckedInput::block(std::uint64_t number) {
  if (number_ != number) {
    number_ = kNone;
    block_.resize(block_size(number));
    take(number, block_);
    number_ = number;
  }
  return block_;
}

void CheckedInput::read(std::uint64_t offset, std::span<std::byte> to) {
  require(offset, to.size());
  while (!to.empty()) {
    const auto number = offset / kBlock, skip = offset % kBlock, size = block_size(number);
    const auto taken = std::min<std::uint64_t>(to.size(), size - skip);
    if (taken == size) {
      take(number, to.first(size));
    } else {
      std::memcpy(to.data(), block(number).data() + skip, taken);
    }
    offset += taken;
    to = to.subspan(taken);
  }
}

void CheckedInput::check(std::uint64_t offset, std::uint64_t size) {
  require(offset, size);
  for (auto number = offset / kBlock; number * kBlock < offset + size; ++number) block(number);
}

}  // namespace lamina::archive
