// SPDX-License-Identifier: Apache-2.0
#include "lamina/frontend/serializer.h"

#include <ATen/ops/arange.h>
#include <gtest/gtest.h>

#include "lamina/value/encoding.h"

namespace lamina {

struct Output {
  at::Tensor logits;
  int count = 0;
};
template <>
struct Serializer<Output> {
  static Value to_value(const Output& output) { return lamina::to_value(std::tuple(output.logits, output.count)); }
  static Output from_value(const Value& tree) {
    auto [logits, count] = lamina::from_value<std::tuple<at::Tensor, int>>(tree);
    return {logits, count};
  }
};

namespace {

// As another rank gets it.
template <class T>
T sent(const T& held) {
  auto encoded = value::encode(to_value(held));
  return from_value<T>(value::decode(encoded.meta, std::move(encoded.buffers)));
}

TEST(SerializerTest, NumbersAndStringsArriveAsTheyWere) {
  EXPECT_EQ(sent(true), true);
  EXPECT_EQ(sent(std::int32_t{-7}), -7);
  EXPECT_EQ(sent(std::uint64_t{7}), 7U);
  EXPECT_EQ(sent(0.1), 0.1);
  EXPECT_EQ(sent(0.5F), 0.5F);
  EXPECT_EQ(sent(std::string("text")), "text");
  EXPECT_EQ(sent(at::kHalf), at::kHalf);
  EXPECT_EQ(sent(at::Device(at::kCPU)), at::Device(at::kCPU));
}

TEST(SerializerTest, ContainersArriveAsTheyWereAtAnyDepth) {
  using Nested = std::tuple<std::vector<std::map<std::string, int>>, std::pair<double, std::optional<std::string>>>;
  const Nested nested{{{{"a", 1}, {"b", 2}}, {}}, {0.5, std::nullopt}};
  EXPECT_EQ(sent(nested), nested);
  const std::unordered_map<int, std::vector<float>> numbers{{1, {1, 2}}, {2, {}}};
  EXPECT_EQ(sent(numbers), numbers);
  EXPECT_EQ(sent(std::optional<int>(3)), 3);
}

TEST(SerializerTest, TensorsArriveWithTheirValuesAndUndefinedOnesStaySo) {
  const auto x = at::arange(6).view({2, 3});
  EXPECT_TRUE(sent(std::vector{x, x}).at(1).equal(x));
  EXPECT_FALSE(sent(at::Tensor()).defined());
}

TEST(SerializerTest, ATypeOfTheUserPassesWhenTravelsIsSpecialisedForIt) {
  const auto output = sent(std::vector{Output{at::arange(3), 5}}).at(0);
  EXPECT_TRUE(output.logits.equal(at::arange(3)));
  EXPECT_EQ(output.count, 5);
}

struct Unknown {};
static_assert(!Serializable<Unknown> && !Serializable<std::vector<Unknown>> && !Serializable<const char*>);
static_assert(Serializable<std::tuple<at::Tensor, std::vector<std::optional<at::Tensor>>>>);

TEST(SerializerTest, AValueOfAnotherKindIsAFormatError) {
  EXPECT_THROW(from_value<int>(Value("text")), base::FormatError);
  EXPECT_THROW(from_value<at::Tensor>(Value(true)), base::FormatError);
  EXPECT_THROW((from_value<std::tuple<int, int>>(to_value(std::tuple(1)))), base::FormatError);
}

}  // namespace
}  // namespace lamina
