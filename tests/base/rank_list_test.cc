// SPDX-License-Identifier: Apache-2.0
#include "lamina/base/rank_list.h"

#include <gtest/gtest.h>

namespace lamina::base {
namespace {

std::string named(std::initializer_list<int> numbers) {
  std::vector<Rank> ranks;
  for (int number : numbers) ranks.emplace_back(number);
  return name_ranks(ranks);
}

TEST(RankList, FoldsWhatFollowsEachOther) {
  EXPECT_EQ(named({3}), "rank 3");
  EXPECT_EQ(named({3, 4}), "ranks 3, 4");
  EXPECT_EQ(named({0, 1, 2, 5}), "ranks 0-2, 5");
  EXPECT_EQ(named({0, 2, 3, 4}), "ranks 0, 2-4");
}

}  // namespace
}  // namespace lamina::base
