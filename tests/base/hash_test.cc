// SPDX-License-Identifier: Apache-2.0
#include "lamina/base/hash.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace lamina::base {
namespace {

// Hashes of the reference implementation, over the first letters of a repeated alphabet, with two seeds.
struct Vector {
  std::size_t length;
  std::uint64_t hash, seeded;
};
const std::vector<Vector> kVectors = {
    {0, 0xef46db3751d8e999, 0xac75fda2929b17ef},  {1, 0xd24ec4f1a98c6e5b, 0x393da8b78992279b},
    {3, 0x44bc2cf5ad770999, 0x1318df30094a85fd},  {4, 0xde0327b0d25d92cc, 0x66150d50767198ee},
    {8, 0x3ad351775b4634b7, 0xdcf6c3eae6ea060f},  {15, 0x2e1218a2b1375068, 0x7055f56019de2238},
    {31, 0xf7d421c242541ac9, 0xb617f40499fd71bc}, {32, 0x4da6cbe536cf55c7, 0xb38b6d1886362fdf},
    {33, 0x9ac581034b031f72, 0x5b582f00197180cf}, {63, 0xa12b47d9d143a6bc, 0xa0bcc5593240aefb},
    {64, 0x14696b774542d718, 0x91acb7b2e7625295}, {100, 0x79c9fa152bb53c71, 0x3aae7f414930a90f},
};

TEST(Hash64, IsXxh64InEveryProcess) {
  std::string text;
  for (int i = 0; i < 100; ++i) text += static_cast<char>('a' + i % 26);
  for (const auto& [length, hash, seeded] : kVectors) {
    EXPECT_EQ(hash64(text.substr(0, length)), hash) << length;
    EXPECT_EQ(hash64(text.substr(0, length), 2654435761), seeded) << length;
  }
}

TEST(Hash64, TakesNumbersAsTheyLieInMemory) {
  EXPECT_EQ(hash64(std::int64_t{-7}, 5), 0xd0be034d9451d785);
  EXPECT_NE(hash64(std::int32_t{1}, 0), hash64(std::int64_t{1}, 0));
}

}  // namespace
}  // namespace lamina::base
