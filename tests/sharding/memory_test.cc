// SPDX-License-Identifier: Apache-2.0
#include "lamina/sharding/memory.h"

#include <ATen/ops/empty.h>
#include <gtest/gtest.h>

namespace lamina::sharding {
namespace {

TEST(Memory, OfShardsIsDividedByTheDegree) {
  const MemoryNeed need{.whole = 100, .sharded = 90, .trained = 60};
  EXPECT_EQ(need.bytes(1), 100 + 60 + 2 * 90);
  EXPECT_EQ(need.bytes(4), 100 + 60 + 2 * 23);
}

TEST(Memory, TheSmallestDegreeDividesTheReplicasAndFitsOnAllRanks) {
  const MemoryNeed small{.sharded = 100, .available = 100}, smaller{.sharded = 100, .available = 60};
  const auto degree = [](std::vector<MemoryNeed> needs, int replicas) { return smallest_degree(needs, replicas); };
  EXPECT_EQ(degree({small}, 4), 2);
  EXPECT_EQ(degree({small, smaller}, 8), 4);
  EXPECT_EQ(degree({small, smaller}, 6), 6);
  EXPECT_EQ(degree({small, smaller}, 2), std::nullopt);
}

TEST(Memory, ThatValuesTakeAlreadyCountsAsThere) {
  const MemoryNeed need{.sharded = 100, .there = 100, .available = 100};
  EXPECT_TRUE(need.fits(1));
}

TEST(Memory, OfATableIsThatOfTheRowsHere) {
  auto trained = at::empty({10}), frozen = at::empty({5}), sharded = at::empty({7}, at::kDouble),
       other = at::empty({3});
  trained.set_requires_grad(true);
  sharded.set_requires_grad(true);
  const base::Partition here(0), elsewhere(1);
  std::vector<model::Parameter> rows{
      model::whole_in(here, "trained", trained, false, 2), model::whole_in(here, "frozen", frozen, false, 2),
      model::whole_in(here, "sharded", sharded, false, 2), model::whole_in(elsewhere, "other", other, false, 2)};
  rows[2].layout.shards = 2;
  const auto need = need_of({std::move(rows), here, 2}, 1000);
  EXPECT_EQ(need.whole, 4 * 15);
  EXPECT_EQ(need.trained, 4 * 10);
  EXPECT_EQ(need.sharded, 8 * 7);
  EXPECT_EQ(need.there, 4 * 15 + 8 * 7);
  EXPECT_EQ(need.available, 1000);
}

}  // namespace
}  // namespace lamina::sharding
