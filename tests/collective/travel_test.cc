// SPDX-License-Identifier: Apache-2.0
#include "lamina/collective/travel.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <gtest/gtest.h>

#include "tests/sharding/members.h"

namespace lamina::collective {
namespace {

using sharding::Over;

// Sums of such numbers, rounded to 8 bits and divided by a few members, are exact in float32, in any order.
at::Tensor numbers(int member, std::int64_t count, at::ScalarType type) {
  auto generator = at::detail::createCPUGenerator(static_cast<std::uint64_t>(member));
  return at::rand({count}, generator, at::TensorOptions(at::kDouble)).mul(0.5).add(0.5).to(type);
}

class Travel : public ::testing::TestWithParam<std::tuple<Over, int>> {};

INSTANTIATE_TEST_SUITE_P(Each, Travel,
                         ::testing::Combine(::testing::Values(Over::kSharedMemory, Over::kGloo),
                                            ::testing::Values(2, 3, 4)));

TEST_P(Travel, EachMembersPartIsRoundedOnceAndTheirSumOnce) {
  const auto [over, size] = GetParam();
  sharding::together(size, over, [size](Group& group) {
    for (const auto from : {at::kFloat, at::kDouble, at::kBFloat16}) {
      for (const auto as : {at::kBFloat16, at::kHalf, at::kFloat}) {
        for (const std::int64_t count : {0, 1, 2, 7, 1000}) {
          auto expected = at::zeros({count}, at::kFloat);
          for (int member = 0; member < size; ++member) {
            const auto wide = numbers(member, count, from).to(from == at::kDouble ? at::kDouble : at::kFloat);
            expected += wide.div(size).to(as).to(at::kFloat);
          }
          const auto tensor = numbers(group.rank(), count, from);
          all_reduce_as(as, tensor, size, group, {"averaging", {std::chrono::seconds(30)}})->wait();
          EXPECT_EQ(tensor.scalar_type(), from);
          if (c10::elementSize(as) == 2) {
            EXPECT_TRUE(at::equal(tensor, expected.to(as).to(from))) << from << " as " << as;
          } else {  // sums of 24 bits depend on their order, which is a carrier's own
            EXPECT_TRUE(at::allclose(tensor.to(at::kFloat), expected.to(from).to(at::kFloat), 1e-6));
          }
          const auto all = at::empty({size, count}, tensor.options());
          group.all_gather(all, tensor, {"comparing", {std::chrono::seconds(30)}})->wait();
          EXPECT_TRUE(at::equal(all, tensor.expand({size, count}))) << "the same bits on all members";
        }
      }
    }
  });
}

TEST_P(Travel, ASumThatIsTooLargeForHalfIsNoneAsAMean) {
  const auto [over, size] = GetParam();
  sharding::together(size, over, [size](Group& group) {
    const auto tensor = at::full({5}, 50000.0, at::kFloat);
    all_reduce_as(at::kHalf, tensor, size, group, {"averaging", {std::chrono::seconds(30)}})->wait();
    EXPECT_TRUE(at::allclose(tensor, at::full({5}, 50000.0), 1e-3));
  });
}

TEST_P(Travel, AScatteredSumOfHalvesMayBeFloat32) {
  const auto [over, size] = GetParam();
  sharding::together(size, over, [size](Group& group) {
    const auto all = numbers(group.rank(), size * 5, at::kBFloat16);
    auto expected = at::zeros({size * 5}, at::kFloat);
    for (int member = 0; member < size; ++member) expected += numbers(member, size * 5, at::kBFloat16);
    const auto mine = at::empty({5}, at::kFloat);
    group.reduce_scatter(mine, all, Reduction::kSum, {"summing", {std::chrono::seconds(30)}})->wait();
    EXPECT_TRUE(at::equal(mine, expected.narrow(0, group.rank() * 5, 5)));
  });
}

TEST(Travelling, OnlyFloatingPointNumbersDoAndWhatWouldChange) {
  EXPECT_EQ(travelling(at::kFloat, at::kBFloat16), at::kBFloat16);
  EXPECT_EQ(travelling(at::kBFloat16, at::kBFloat16), at::kBFloat16) << "their sums are float32";
  EXPECT_EQ(travelling(at::kFloat, at::kFloat), std::nullopt);
  EXPECT_EQ(travelling(at::kComplexFloat, at::kHalf), std::nullopt);
  EXPECT_EQ(travelling(at::kFloat, std::nullopt), std::nullopt);
}

}  // namespace
}  // namespace lamina::collective
