// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <bit>
#include <cstdint>
#include <string_view>
#include <type_traits>

namespace lamina::base {

static_assert(std::endian::native == std::endian::little, "ranks compare hashes of numbers as they lie in memory");

// The XXH64 hash of `bytes` (Yann Collet, xxHash fast digest algorithm, 2021): the same in every process, on every
// machine and from every compiler, which std::hash does not promise. Whatever leaves the process is hashed by it. One
// hash goes on where another ended when that is its seed.
std::uint64_t hash64(std::string_view bytes, std::uint64_t seed = 0);

// The hash of a number as it lies in memory.
template <class T>
  requires(std::is_arithmetic_v<T> || std::is_enum_v<T>)
std::uint64_t hash64(T number, std::uint64_t seed) {
  return hash64(std::string_view(reinterpret_cast<const char*>(&number), sizeof(number)), seed);
}

}  // namespace lamina::base
