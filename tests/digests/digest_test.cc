// SPDX-License-Identifier: Apache-2.0
#include "lamina/digests/digest.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

namespace lamina::digests {
namespace {

// Numbers without a pattern.
std::vector<double> numbers(std::int64_t count) {
  std::vector<double> made;
  for (std::int64_t i = 0; i < count; ++i) made.push_back(std::sin(static_cast<double>(i * i % 1009)));
  return made;
}

TEST(Digest, AddsNumbersUpWithTheSignsOfTheirPlaces) {
  const auto all = numbers(kBlock);
  for (const auto& [begin, end] : {std::pair(0, 3), {5, 700}, {0, 2048}, {255, 2047}, {512, 768}, {1000, 1001}}) {
    std::vector<double> part(all.begin() + begin, all.begin() + end);
    Digest digest;
    add(digest, 7 * kBlock + begin, part);
    for (int projection = 0; projection < kProjections; ++projection) {
      double sum = 0;
      for (int i = begin; i < end; ++i) sum += all[i] * sign_of(7 * kBlock + i, projection);
      EXPECT_NEAR(digest.projections[projection], sum, 1e-9);
    }
    double squares = 0, largest = 0;
    for (int i = begin; i < end; ++i) squares += all[i] * all[i], largest = std::max(largest, std::abs(all[i]));
    EXPECT_NEAR(digest.squares, squares, 1e-9);
    EXPECT_NEAR(digest.largest, largest, 1e-12);
  }
}

TEST(Digest, CountsWhatIsNotFinite) {
  auto part = numbers(600);
  part[3] = std::numeric_limits<double>::infinity();
  part[300] = std::numeric_limits<double>::quiet_NaN();
  Digest digest;
  add(digest, 0, part);
  EXPECT_EQ(digest.not_finite, 2);
  EXPECT_TRUE(std::isfinite(digest.squares));
  EXPECT_TRUE(std::isfinite(digest.projections[0]));
  EXPECT_LE(digest.largest, 1);
}

// The difference of two tensors shows in their projections about as large as it is, wherever it lies.
TEST(Digest, TellsElementsThatChangedPlaces) {
  for (const int apart : {1, 8, 64, 256, 300}) {
    auto all = numbers(kBlock), moved = all;
    for (int i = 0; i < 8; ++i) std::swap(moved[i], moved[i + apart]);
    Digest one, other;
    add(one, 0, all);
    add(other, 0, moved);
    double squares = 0, expected = 0;
    for (int i = 0; i < kProjections; ++i) squares += std::pow(one.projections[i] - other.projections[i], 2);
    const auto before = numbers(kBlock);
    for (int i = 0; i < kBlock; ++i) expected += std::pow(before[i] - moved[i], 2);
    EXPECT_GT(squares / kProjections, expected / 10) << apart;
  }
}

}  // namespace
}  // namespace lamina::digests
