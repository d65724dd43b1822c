// SPDX-License-Identifier: Apache-2.0
#include "lamina/base/hash.h"

namespace lamina::base {
namespace {

constexpr std::uint64_t kPrimes[] = {0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63,
                                     0x27D4EB2F165667C5};

// The number that lies at the beginning of `bytes`, taken from them.
template <class T>
std::uint64_t take(std::string_view& bytes) {
  T number;
  bytes.copy(reinterpret_cast<char*>(&number), sizeof(number));
  bytes.remove_prefix(sizeof(number));
  return number;
}

std::uint64_t round(std::uint64_t lane, std::uint64_t input) {
  return std::rotl(lane + input * kPrimes[1], 31) * kPrimes[0];
}

// Takes all whole blocks of 32 bytes, four lanes side by side.
std::uint64_t take_blocks(std::string_view& bytes, std::uint64_t seed) {
  std::uint64_t lanes[] = {seed + kPrimes[0] + kPrimes[1], seed + kPrimes[1], seed, seed - kPrimes[0]};
  while (bytes.size() >= 32) {
    for (auto& lane : lanes) lane = round(lane, take<std::uint64_t>(bytes));
  }
  std::uint64_t hash =
      std::rotl(lanes[0], 1) + std::rotl(lanes[1], 7) + std::rotl(lanes[2], 12) + std::rotl(lanes[3], 18);
  for (const auto lane : lanes) hash = (hash ^ round(0, lane)) * kPrimes[0] + kPrimes[3];
  return hash;
}

}  // namespace

std::uint64_t hash64(std::string_view bytes, std::uint64_t seed) {
  const std::uint64_t length = bytes.size();
  std::uint64_t hash = (length >= 32 ? take_blocks(bytes, seed) : seed + kPrimes[4]) + length;
  while (bytes.size() >= 8) {
    hash = std::rotl(hash ^ round(0, take<std::uint64_t>(bytes)), 27) * kPrimes[0] + kPrimes[3];
  }
  if (bytes.size() >= 4) hash = std::rotl(hash ^ take<std::uint32_t>(bytes) * kPrimes[0], 23) * kPrimes[1] + kPrimes[2];
  while (!bytes.empty()) hash = std::rotl(hash ^ take<std::uint8_t>(bytes) * kPrimes[4], 11) * kPrimes[0];
  hash = (hash ^ hash >> 33) * kPrimes[1];
  hash = (hash ^ hash >> 29) * kPrimes[2];
  return hash ^ hash >> 32;
}

}  // namespace lamina::base
