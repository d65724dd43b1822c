// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <bit>
#include <cstdint>

namespace lamina::layout {

// The two ways in which a number lies in 16 bits, without branches, so that compilers make vectors of loops over them.
struct BFloat16 {
  using Stored = std::uint16_t;
  using Wide = float;
  static float widen(Stored value) { return std::bit_cast<float>(static_cast<std::uint32_t>(value) << 16); }
  static Stored narrow(float value) {
    const auto bits = std::bit_cast<std::uint32_t>(value);
    const auto rounded = static_cast<Stored>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);  // to nearest, ties to even
    return value != value ? Stored{0x7FC0} : rounded;
  }
};

// A half has 5 bits of exponent, biased by 15, and 10 of mantissa; a float 8, by 127, and 23.
struct Float16 {
  using Stored = std::uint16_t;
  using Wide = float;
  static float widen(Stored value) {
    const std::uint32_t sign = (value & 0x8000U) << 16, rest = (value & 0x7FFFU) << 13;
    // The exponent is moved by a multiplication, which normalises what was subnormal.
    const auto scaled = std::bit_cast<std::uint32_t>(std::bit_cast<float>(rest) * 0x1p112F);
    const std::uint32_t special = rest >= 0x0F800000U ? rest | 0x70000000U : scaled;  // infinity and NaN
    return std::bit_cast<float>(sign | special);
  }
  static Stored narrow(float value) {
    const auto bits = std::bit_cast<std::uint32_t>(value);
    const std::uint32_t sign = bits >> 16 & 0x8000U, rest = bits & 0x7FFFFFFFU;
    // Normal numbers: the exponent is moved, the mantissa rounded to nearest, ties to even.
    const std::uint32_t normal = (rest - 0x38000000U + 0xFFFU + (rest >> 13 & 1)) >> 13;
    // Subnormal ones: an addition moves the last bit that stays to the end of the mantissa, and rounds.
    const std::uint32_t small = std::bit_cast<std::uint32_t>(std::bit_cast<float>(rest) + 0.5F) - 0x3F000000U;
    std::uint32_t half = rest < 0x38800000U ? small : normal;
    half = rest >= 0x477FF000U ? 0x7C00U : half;  // rounds to infinity
    half = rest > 0x7F800000U ? 0x7E00U : half;   // NaN
    return static_cast<Stored>(sign | half);
  }
};

}  // namespace lamina::layout
