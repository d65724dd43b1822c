// SPDX-License-Identifier: Apache-2.0
#include "lamina/fused/follow.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <vector>

#include "lamina/fused/blocks.h"

namespace lamina::fused {
namespace {

void follow_block(float* elements, layout::DType dtype, const std::uint16_t* copies, std::size_t count,
                  Vectors vectors) {
  std::array<std::uint16_t, kBlock> rounded;
  store<float>(elements, dtype, rounded.data(), 0, count, vectors);
  if (std::memcmp(rounded.data(), copies, count * sizeof(std::uint16_t)) == 0) return;
  std::array<float, kBlock> values;
  load<float>(dtype, copies, 0, count, values.data(), vectors);
  for (std::size_t i = 0; i < count; ++i) {
    if (rounded[i] != copies[i]) elements[i] = values[i];
  }
}

}  // namespace

void follow(std::span<const Copied> all, const Workers& workers) {
  std::vector<Copied> pieces;
  for (const auto& each : all) {
    const auto* copies = static_cast<const std::uint16_t*>(each.copies);
    for (std::size_t begin = 0; begin < each.count; begin += workers.chunk) {
      pieces.push_back(
          {each.elements + begin, each.copy_dtype, copies + begin, std::min(workers.chunk, each.count - begin)});
    }
  }
  workers.threads.run(pieces.size(), [&](std::size_t number) {
    const auto& piece = pieces[number];
    const auto* copies = static_cast<const std::uint16_t*>(piece.copies);
    for (std::size_t begin = 0; begin < piece.count; begin += kBlock) {
      follow_block(piece.elements + begin, piece.copy_dtype, copies + begin, std::min(kBlock, piece.count - begin),
                   workers.vectors);
    }
  });
}

}  // namespace lamina::fused
