// SPDX-License-Identifier: Apache-2.0
#include "lamina/layout/place.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "lamina/base/error.h"

namespace lamina::layout {
namespace {

using base::ConfigError;
using base::UsageError;
using topology::Topology;

ParameterLayout sliced(int degree, int shards = 1) {
  return {.name = "w", .shape = {8}, .slicing = Slicing{0, {{8}}, degree}, .shards = shards};
}

TEST(Place, ShardsGoRoundOverReplicasThenOverTensorRanks) {
  const Topology topology(8, 1, 2);
  const ParameterLayout layout{.name = "w", .shape = {8}, .shards = 2};
  EXPECT_EQ(place(layout, topology, {.tp = 0, .rdp = 1}), (Place{.shard = 1, .copy = 0}));
  EXPECT_EQ(place(layout, topology, {.tp = 0, .rdp = 2}), (Place{.shard = 0, .copy = 1}));
  EXPECT_EQ(place(layout, topology, {.tp = 1, .rdp = 3}), (Place{.shard = 1, .copy = 3}));
}

TEST(Place, StatesCanBeShardedOverAllRanksThatHoldTheParameter) {
  const Topology topology(8, 1, 2);
  const ParameterLayout state{.name = "w", .shape = {8}, .shards = 8};
  EXPECT_EQ(place(state, topology, {.tp = 1, .rdp = 2}), (Place{.shard = 6}));
  EXPECT_EQ(place(sliced(2, 4), topology, {.tp = 1, .rdp = 2}), (Place{.slice = 1, .shard = 2}));
}

TEST(Place, NeighboursShareASliceWhenThereAreFewerThanTensorRanks) {
  const Topology topology(4, 1, 4);
  EXPECT_EQ(place(sliced(2), topology, {.tp = 1}), (Place{.slice = 0, .copy = 1}));
  EXPECT_EQ(place(sliced(2), topology, {.tp = 2}), (Place{.slice = 1, .copy = 0}));
}

TEST(Place, DegreesThatDoNotFitTheRanksAreErrors) {
  const Topology topology(8, 2, 2);
  ParameterLayout layout = sliced(2, 2);
  layout.partition = base::Partition(2);
  EXPECT_THROW(place(layout, topology, {}), ConfigError);
  EXPECT_THROW(place(sliced(4), topology, {}), ConfigError);
  EXPECT_THROW(place(sliced(2, 4), topology, {}), ConfigError);
  EXPECT_THROW(copies(sliced(2, 0), topology), ConfigError);
}

TEST(Place, ARankThatThereIsNotIsAnError) {
  const Topology topology(8, 2, 2);
  EXPECT_THROW(place(sliced(2), topology, {.pp = 2}), UsageError);
}

}  // namespace
}  // namespace lamina::layout
