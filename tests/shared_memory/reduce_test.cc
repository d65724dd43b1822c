// SPDX-License-Identifier: Apache-2.0
#include "lamina/shared_memory/reduce.h"

#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <cmath>
#include <limits>
#include <vector>

namespace lamina::shared_memory {
namespace {

using layout::DType;

template <class T>
std::vector<T> reduced(DType dtype, Reduction reduction, const std::vector<std::vector<T>>& sources) {
  std::vector<const std::byte*> places;
  for (const auto& source : sources) places.push_back(reinterpret_cast<const std::byte*>(source.data()));
  std::vector<T> out(sources[0].size());
  reduce(dtype, reduction, reinterpret_cast<std::byte*>(out.data()), places, out.size());
  return out;
}

// The value of a number of 16 bits, from its definition.
double half(std::uint16_t bits, int exponent_bits) {
  const int mantissa_bits = 15 - exponent_bits, bias = (1 << (exponent_bits - 1)) - 1;
  const int exponent = bits >> mantissa_bits & ((1 << exponent_bits) - 1), mantissa = bits & ((1 << mantissa_bits) - 1);
  const double sign = bits >> 15 ? -1 : 1;
  if (exponent == (1 << exponent_bits) - 1) return mantissa ? std::nan("") : sign * INFINITY;
  if (exponent == 0) return sign * std::ldexp(mantissa, 1 - bias - mantissa_bits);
  return sign * std::ldexp((1 << mantissa_bits) + mantissa, exponent - bias - mantissa_bits);
}

struct Kind {
  DType dtype;
  int exponent_bits;
};

class Half : public ::testing::TestWithParam<Kind> {};

// A sum with zero widens and narrows each of them.
TEST_P(Half, KeepsEveryValue) {
  std::vector<std::uint16_t> all(1 << 16);
  for (std::size_t i = 0; i < all.size(); ++i) all[i] = static_cast<std::uint16_t>(i);
  const auto same = reduced<std::uint16_t>(GetParam().dtype, Reduction::kMax, {all, all});
  for (std::size_t i = 0; i < all.size(); ++i) {
    const double before = half(all[i], GetParam().exponent_bits), after = half(same[i], GetParam().exponent_bits);
    ASSERT_TRUE(std::isnan(before) ? std::isnan(after) : all[i] == same[i]) << i;
  }
}

// The result is the nearest to the sum in 32 bits; of two that are as near the even one.
TEST_P(Half, RoundsASumToTheNearest) {
  const auto [dtype, exponent_bits] = GetParam();
  std::vector<std::uint16_t> left, right;
  for (std::uint32_t i = 0; i < 1 << 16; i += 13) {
    left.push_back(static_cast<std::uint16_t>(i));
    right.push_back(static_cast<std::uint16_t>(i * 40503U >> 3));
  }
  const auto sums = reduced<std::uint16_t>(dtype, Reduction::kSum, {left, right});
  for (std::size_t i = 0; i < sums.size(); ++i) {
    const float exact =
        static_cast<float>(half(left[i], exponent_bits)) + static_cast<float>(half(right[i], exponent_bits));
    const double got = half(sums[i], exponent_bits);
    if (std::isnan(exact)) {
      ASSERT_TRUE(std::isnan(got));
      continue;
    }
    if (std::isinf(got)) {
      const double largest =
          half(static_cast<std::uint16_t>((((1 << exponent_bits) - 1) << (15 - exponent_bits)) - 1), exponent_bits);
      ASSERT_GT(std::abs(exact), largest) << i;
      continue;
    }
    for (const int step : {-1, 1}) {
      const auto neighbour = static_cast<std::uint16_t>(sums[i] + step);
      const double other = half(neighbour, exponent_bits);
      if (!std::isfinite(other) || (neighbour >> 15) != (sums[i] >> 15)) continue;
      const double error = std::abs(got - exact), others = std::abs(other - exact);
      ASSERT_TRUE(error < others || (error == others && (sums[i] & 1) == 0)) << i << " " << exact << " " << got;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Kinds, Half, ::testing::Values(Kind{DType::kFloat16, 5}, Kind{DType::kBFloat16, 8}),
                         [](const auto& info) { return std::string(layout::traits(info.param.dtype).name); });

TEST(Reduce, IsEachReductionOfIntegersInTheOrderOfTheSources) {
  const std::vector<std::vector<std::int32_t>> sources{{7, -5, 12}, {3, 9, 10}, {-8, 1, 6}};
  const auto is = [&](Reduction reduction) { return reduced<std::int32_t>(DType::kInt32, reduction, sources); };
  EXPECT_EQ(is(Reduction::kSum), (std::vector<std::int32_t>{2, 5, 28}));
  EXPECT_EQ(is(Reduction::kMean), (std::vector<std::int32_t>{0, 1, 9}));
  EXPECT_EQ(is(Reduction::kProduct), (std::vector<std::int32_t>{-168, -45, 720}));
  EXPECT_EQ(is(Reduction::kMin), (std::vector<std::int32_t>{-8, -5, 6}));
  EXPECT_EQ(is(Reduction::kMax), (std::vector<std::int32_t>{7, 9, 12}));
  EXPECT_EQ(is(Reduction::kBitAnd), (std::vector<std::int32_t>{7 & 3 & -8, -5 & 9 & 1, 12 & 10 & 6}));
  EXPECT_EQ(is(Reduction::kBitOr), (std::vector<std::int32_t>{7 | 3 | -8, -5 | 9 | 1, 12 | 10 | 6}));
  EXPECT_EQ(is(Reduction::kBitXor), (std::vector<std::int32_t>{7 ^ 3 ^ -8, -5 ^ 9 ^ 1, 12 ^ 10 ^ 6}));
}

TEST(Reduce, LetsIntegersWrapAndNanThrough) {
  EXPECT_EQ(reduced<std::int8_t>(DType::kInt8, Reduction::kSum, {{127}, {1}}), std::vector<std::int8_t>{-128});
  // Their means do not.
  EXPECT_EQ(reduced<std::int8_t>(DType::kInt8, Reduction::kMean, {{127, -128}, {101, -126}}),
            (std::vector<std::int8_t>{114, -127}));
  EXPECT_EQ(reduced<std::uint8_t>(DType::kUInt8, Reduction::kMean, {{255}, {253}, {254}}),
            std::vector<std::uint8_t>{254});
  EXPECT_EQ(reduced<std::int32_t>(DType::kInt32, Reduction::kMean, {{INT32_MAX}, {INT32_MAX}}),
            std::vector<std::int32_t>{INT32_MAX});
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (const auto reduction : {Reduction::kMin, Reduction::kMax, Reduction::kSum, Reduction::kMean}) {
    for (const float value : reduced<float>(DType::kFloat32, reduction, {{nan, 1}, {1, nan}}))
      EXPECT_TRUE(std::isnan(value));
  }
}

TEST(Reduce, OfTruthValuesIsAnyOrAll) {
  const std::vector<std::vector<std::uint8_t>> sources{{0, 1, 1}, {0, 0, 1}};
  EXPECT_EQ(reduced<std::uint8_t>(DType::kBool, Reduction::kSum, sources), (std::vector<std::uint8_t>{0, 1, 1}));
  EXPECT_EQ(reduced<std::uint8_t>(DType::kBool, Reduction::kProduct, sources), (std::vector<std::uint8_t>{0, 0, 1}));
  EXPECT_FALSE(reducible(DType::kBool, Reduction::kMean));
}

TEST(Reduce, HasNoOrderOfComplexNumbersAndNoBitsOfFloats) {
  EXPECT_TRUE(reducible(DType::kComplex64, Reduction::kSum));
  EXPECT_FALSE(reducible(DType::kComplex64, Reduction::kMax));
  EXPECT_FALSE(reducible(DType::kFloat32, Reduction::kBitAnd));
  EXPECT_FALSE(reducible(DType::kQInt8, Reduction::kSum));
}

}  // namespace
}  // namespace lamina::shared_memory
