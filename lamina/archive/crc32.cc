// SPDX-License-Identifier: Apache-2.0
#include "lamina/archive/crc32.h"

#include <array>
#include <cstring>

namespace lamina::archive {
namespace {

constexpr std::size_t kStep = 8;  // bytes at once: table i tells what a byte does that is followed by i others

constexpr auto kTables = [] {
  std::array<std::array<std::uint32_t, 256>, kStep> tables{};
  for (std::uint32_t byte = 0; byte < 256; ++byte) {
    auto value = byte;
    for (int bit = 0; bit < 8; ++bit) value = value >> 1 ^ ((value & 1) != 0 ? 0xedb88320 : 0);
    tables[0][byte] = value;
  }
  for (std::size_t i = 1; i < kStep; ++i) {
    for (std::size_t byte = 0; byte < 256; ++byte) {
      const auto before = tables[i - 1][byte];
      tables[i][byte] = before >> 8 ^ tables[0][before & 0xff];
    }
  }
  return tables;
}();

}  // namespace

void Crc32::add(std::span<const std::byte> bytes) {
  auto state = state_;
  for (; bytes.size() >= kStep; bytes = bytes.subspan(kStep)) {
    std::uint64_t word = 0;
    std::memcpy(&word, bytes.data(), kStep);
    word ^= state;
    state = 0;
    for (std::size_t i = 0; i < kStep; ++i) state ^= kTables[kStep - 1 - i][word >> (8 * i) & 0xff];
  }
  for (const auto byte : bytes) state = state >> 8 ^ kTables[0][(state ^ std::to_integer<std::uint32_t>(byte)) & 0xff];
  state_ = state;
}

}  // namespace lamina::archive
