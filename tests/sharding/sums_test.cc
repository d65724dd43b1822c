// SPDX-License-Identifier: Apache-2.0
#include "lamina/sharding/sums.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

namespace lamina::sharding {
namespace {

TEST(Sums, HaveTheSizeAndTypeOfShardsAndLieApart) {
  const std::vector<Spec> parameters{{7, at::kFloat}, {4, at::kDouble}, {1000, at::kFloat}, {3, at::kBFloat16}};
  Sums sums(parameters, 2);
  std::vector<at::Tensor> taken;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    taken.push_back(sums.take(i).fill_(static_cast<double>(i)));
    EXPECT_EQ(taken[i].numel(), parameters[i].shard_numel(2));
    EXPECT_EQ(taken[i].scalar_type(), parameters[i].dtype);
  }
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    EXPECT_TRUE(taken[i].eq(static_cast<double>(i)).all().item<bool>());
  }
}

TEST(Sums, TakeTheMemoryOfOneThatIsGoneAndLeaveOneThatIsKept) {
  Sums sums(std::vector<Spec>{{64, at::kFloat}}, 2);
  auto first = sums.take(0);
  const auto* memory = first.const_data_ptr();
  first.reset();
  auto second = sums.take(0).fill_(1);
  EXPECT_EQ(second.const_data_ptr(), memory);
  const auto kept = second.detach();  // as a user may keep a gradient
  second.reset();
  EXPECT_NE(sums.take(0).fill_(2).const_data_ptr(), memory);
  EXPECT_TRUE(kept.eq(1).all().item<bool>());
}

TEST(Sums, OutliveWhatTheyCameFrom) {
  at::Tensor sum;
  {
    Sums sums(std::vector<Spec>{{1 << 20, at::kFloat}}, 2);
    sum = sums.take(0).fill_(3);
  }
  EXPECT_TRUE(sum.eq(3).all().item<bool>());
}

}  // namespace
}  // namespace lamina::sharding
