// SPDX-License-Identifier: Apache-2.0
#include "lamina/archive/block_reader.h"

#include <algorithm>
#include <cstring>

namespace lamina::archive {

void BlockReader::read(std::uint64_t offset, std::span<std::byte> to) {
  input_.require(offset, to.size());
  while (!to.empty()) {
    const auto number = offset / kBlock, skip = offset % kBlock;
    const auto size = input_.block_size(number);
    auto taken = std::min<std::uint64_t>(to.size(), size - skip);
    if (taken == size) {
      taken = std::max(size, to.size() / kBlock * kBlock);  // several at once
      input_.read(offset, to.first(taken));
    } else {
      std::memcpy(to.data(), block(number).data() + skip, taken);
    }
    offset += taken;
    to = to.subspan(taken);
  }
}

void BlockReader::check(std::uint64_t offset, std::uint64_t size) {
  input_.require(offset, size);
  for (auto number = offset / kBlock; number * kBlock < offset + size; ++number) block(number);
}

std::span<const std::byte> BlockReader::block(std::uint64_t number) {
  if (number_ != number) {
    number_ = kNone;
    block_.resize(input_.block_size(number));
    input_.read(number * kBlock, block_);
    number_ = number;
  }
  return block_;
}

}  // namespace lamina::archive
