// SPDX-License-Identifier: Apache-2.0
#include "lamina/rendezvous/places.h"

#include <gtest/gtest.h>

#include <tuple>

namespace lamina::rendezvous {
namespace {

// The machine of a rank, its place there, and how many ranks are there, by what the ranks say of their machines.
std::tuple<int, int, int> place(int rank, const std::vector<std::string>& machines) {
  environment::World world;
  world.rank = base::Rank(rank);
  world.size = static_cast<int>(machines.size());
  const auto placed = placed_by(world, machines);
  EXPECT_EQ(placed.rank, world.rank);
  EXPECT_EQ(placed.size, world.size);
  return {placed.node_rank, placed.local_rank, placed.local_size};
}

TEST(Places, RanksOfAMachineAreCountedInTheirOrder) {
  const std::vector<std::string> machines{"a", "a", "b", "b"};
  EXPECT_EQ(place(0, machines), std::tuple(0, 0, 2));
  EXPECT_EQ(place(1, machines), std::tuple(0, 1, 2));
  EXPECT_EQ(place(2, machines), std::tuple(1, 0, 2));
  EXPECT_EQ(place(3, machines), std::tuple(1, 1, 2));
}

TEST(Places, RanksThatAreDealtOutInTurnAreFoundAndMachinesMayDiffer) {
  const std::vector<std::string> machines{"b", "a", "b", "c", "b"};
  EXPECT_EQ(place(4, machines), std::tuple(0, 2, 3));
  EXPECT_EQ(place(1, machines), std::tuple(1, 0, 1));
  EXPECT_EQ(place(3, machines), std::tuple(2, 0, 1));
}

TEST(Places, ARankThatSaysNothingIsAlone) {
  const std::vector<std::string> machines{"", "a", "", "a"};
  EXPECT_EQ(place(0, machines), std::tuple(0, 0, 1));
  EXPECT_EQ(place(2, machines), std::tuple(2, 0, 1));
  EXPECT_EQ(place(3, machines), std::tuple(1, 1, 2));
}

TEST(Places, AWorldOfOneIsAMachineOfItsOwn) { EXPECT_EQ(place(0, {"a"}), std::tuple(0, 0, 1)); }

}  // namespace
}  // namespace lamina::rendezvous
