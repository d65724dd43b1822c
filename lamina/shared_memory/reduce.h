// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "lamina/layout/dtype.h"

namespace lamina::shared_memory {

enum class Reduction : std::uint8_t { kSum, kMean, kProduct, kMin, kMax, kBitAnd, kBitOr, kBitXor };

// True where elements of this type can be reduced so.
bool reducible(layout::DType dtype, Reduction reduction);

// out[i] = the reduction of sources[0][i], sources[1][i], ..., in this order: the same bits for whoever computes it.
// Elements of 16 bits are accumulated in 32, and rounded once; integers wrap, and a mean of them is that of their sum
// in 64 bits, cut off. NaN goes through minima and maxima. `out` may be one of the sources.
void reduce(layout::DType dtype, Reduction reduction, std::byte* out, std::span<const std::byte* const> sources,
            std::size_t count);

}  // namespace lamina::shared_memory
