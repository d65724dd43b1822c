// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace lamina::runtime {

// A stream takes the lower half of its seed, so that the upper one can say who gave it.
inline constexpr std::uint64_t kUpperHalf = 0xffffffff'00000000;
inline constexpr std::uint64_t kOurs = 0x6c616d69'00000000;

// The seed of a stream that nobody has seeded by hand.
inline std::uint64_t stream_seed(std::uint64_t number) { return kOurs | (number & ~kUpperHalf); }
inline bool is_by_hand(std::uint64_t seed) { return (seed & kUpperHalf) != kOurs; }

}  // namespace lamina::runtime
