// SPDX-License-Identifier: Apache-2.0
#include "lamina/topology/topology.h"

#include <gtest/gtest.h>

#include "lamina/base/error.h"

namespace lamina::topology {
namespace {

using base::Rank;

std::vector<std::vector<int>> groups(const Topology& topology, Group group) {
  std::vector<std::vector<int>> all;
  for (int rank = 0; rank < topology.size(Group::kWorld); ++rank) {
    std::vector<int> members;
    for (Rank member : topology.members(group, Rank(rank))) members.push_back(static_cast<int>(member.value));
    if (members.front() == rank) all.push_back(members);
  }
  return all;
}

struct Place {
  int rdp, pp, tp;
};

void expect_places(std::string_view strategy, const std::vector<Place>& places) {
  const Topology topology(8, 2, 2, strategy);
  for (int rank = 0; rank < 8; ++rank) {
    const auto& [rdp, pp, tp] = places[static_cast<std::size_t>(rank)];
    EXPECT_EQ(topology.coordinates(Rank(rank)), (Coordinates{pp, tp, rdp})) << strategy << " rank " << rank;
    EXPECT_EQ(topology.index(Group::kRdp, Rank(rank)), rdp);
    EXPECT_EQ(topology.index(Group::kPp, Rank(rank)), pp);
    EXPECT_EQ(topology.index(Group::kTp, Rank(rank)), tp);
  }
}

const std::vector<Place> kDpt{{0, 0, 0}, {0, 0, 1}, {0, 1, 0}, {0, 1, 1}, {1, 0, 0}, {1, 0, 1}, {1, 1, 0}, {1, 1, 1}};
const std::vector<Place> kPtd{{0, 0, 0}, {1, 0, 0}, {0, 0, 1}, {1, 0, 1}, {0, 1, 0}, {1, 1, 0}, {0, 1, 1}, {1, 1, 1}};
const std::vector<Place> kTpd{{0, 0, 0}, {1, 0, 0}, {0, 1, 0}, {1, 1, 0}, {0, 0, 1}, {1, 0, 1}, {0, 1, 1}, {1, 1, 1}};
const std::vector<Place> kDtp{{0, 0, 0}, {0, 1, 0}, {0, 0, 1}, {0, 1, 1}, {1, 0, 0}, {1, 1, 0}, {1, 0, 1}, {1, 1, 1}};

TEST(Placement, EightRanksStandAsDocumented) {
  expect_places("DPT", kDpt);
  expect_places("cluster", kDpt);
  expect_places("PTD", kPtd);
  expect_places("TPD", kTpd);
  expect_places("spread", kTpd);
  expect_places("DTP", kDtp);
}

TEST(Placement, WithoutTensorParallelismClusterKeepsAModelTogetherAndSpreadKeepsReplicasTogether) {
  using Groups = std::vector<std::vector<int>>;
  EXPECT_EQ(groups(Topology(8, 2, 1, "cluster"), Group::kMp), (Groups{{0, 1}, {2, 3}, {4, 5}, {6, 7}}));
  EXPECT_EQ(groups(Topology(8, 2, 1, "spread"), Group::kMp), (Groups{{0, 4}, {1, 5}, {2, 6}, {3, 7}}));
  EXPECT_EQ(groups(Topology(8, 2, 1, "cluster"), Group::kDp), (Groups{{0, 2, 4, 6}, {1, 3, 5, 7}}));
  EXPECT_EQ(groups(Topology(8, 2, 1, "spread"), Group::kDp), (Groups{{0, 1, 2, 3}, {4, 5, 6, 7}}));
}

TEST(Placement, AnythingElseIsAConfigError) {
  for (const char* wrong : {"", "dpt", "DP", "DDT", "DPTT", "clusters"}) {
    EXPECT_THROW(Topology(8, 2, 2, wrong), base::ConfigError) << wrong;
  }
}

TEST(Topology, AWorldThatTheDegreesDoNotDivideIsAnErrorThatSaysWhatWouldDo) {
  try {
    Topology(8, 3, 2);
    FAIL();
  } catch (const base::ConfigError& error) {
    EXPECT_STREQ(
        error.what(),
        "partitions: 3 times tensor_parallel_degree: 2 is 6, which does not divide the 8 processes of this job; "
        "expected 6 processes or a multiple of that, or other degrees");
  }
  EXPECT_THROW(Topology(2, 4, 1), base::ConfigError);
  EXPECT_THROW(Topology(8, 65536, 65536), base::ConfigError);
  EXPECT_THROW(Topology(0, 1, 1), base::ConfigError);
}

TEST(Topology, AskingForARankThatDoesNotExistIsAUsageError) {
  const Topology topology(4, 2, 1);
  EXPECT_THROW(topology.coordinates(Rank(4)), base::UsageError);
  EXPECT_THROW(topology.members(Group::kPp, Rank(-1)), base::UsageError);
  EXPECT_THROW(topology.rank({2, 0, 0}), base::UsageError);
  EXPECT_THROW(topology.translate(Group::kPp, 2, Rank(0)), base::UsageError);
  EXPECT_THROW(topology.translate(Group::kPp, -1, Rank(0)), base::UsageError);
}

TEST(Topology, KnowsThePlacementsThatKeepGroupsOnOneMachine) {
  const auto of = [](std::string_view strategy, std::vector<int> nodes) {
    const Topology topology(4, 2, 1, strategy, {.shard = 2, .nodes = std::move(nodes)});
    return placements_on_one_machine(topology, 4, Group::kShard);
  };
  EXPECT_TRUE(of("cluster", {}).empty()) << "there is one";
  const auto better = of("cluster", {0, 0, 1, 1});  // replicas 0 and 1 of a partition are ranks 0 and 2
  ASSERT_FALSE(better.empty());
  EXPECT_EQ(better.front(), "spread");
  EXPECT_TRUE(of("spread", {0, 0, 1, 1}).empty()) << "it is so already";
  EXPECT_TRUE(of("cluster", {0, 1, 2, 3}).empty()) << "none does";
}

Topology sharded(int degree) { return Topology(8, 2, 1, "cluster", {.shard = degree}); }

TEST(Topology, ShardsLieOnConsecutiveRanksThatHoldTheSameParameters) {
  using Groups = std::vector<std::vector<int>>;
  EXPECT_EQ(groups(sharded(1), Group::kShard), (Groups{{0}, {1}, {2}, {3}, {4}, {5}, {6}, {7}}));
  EXPECT_EQ(groups(sharded(2), Group::kShard), (Groups{{0, 2}, {1, 3}, {4, 6}, {5, 7}}));
  EXPECT_EQ(groups(sharded(4), Group::kShard), groups(sharded(4), Group::kRdp));
  EXPECT_EQ(sharded(2).size(Group::kShard), 2);
  EXPECT_EQ(sharded(2).index(Group::kShard, Rank(7)), 1);
  EXPECT_EQ(sharded(2).translate(Group::kShard, 0, Rank(7)), Rank(5));
  EXPECT_THROW(sharded(2).translate(Group::kShard, 2, Rank(7)), base::UsageError);
}

TEST(Topology, ShardsHaveToDivideTheRanksThatHoldTheSameParameters) {
  for (const int degree : {1, 2, 4}) EXPECT_NO_THROW(sharded(degree));
  for (const int degree : {0, -1, 3, 8}) EXPECT_THROW(sharded(degree), base::ConfigError);
  try {
    Topology(8, 2, 2, "cluster", {.shard = 4});  // divides the 4 ranks that read different data
    FAIL();
  } catch (const base::ConfigError& error) {
    EXPECT_STREQ(
        error.what(),
        "sharded_data_parallel_degree: 4 is not allowed with 2 ranks that hold the same parameters; expected a "
        "divisor of 2");
  }
}

TEST(Topology, ANodeHasTheRanksOfOneMachine) {
  using Groups = std::vector<std::vector<int>>;
  EXPECT_EQ(groups(Topology(4, 2, 1), Group::kNode), (Groups{{0, 1, 2, 3}})) << "one machine";
  for (const char* strategy : {"cluster", "spread"}) {
    const Topology topology(6, 2, 1, strategy, {.nodes = {0, 0, 1, 1, 2, 2}});
    EXPECT_EQ(groups(topology, Group::kNode), (Groups{{0, 1}, {2, 3}, {4, 5}}));
    EXPECT_EQ(topology.size(Group::kNode), 2);
    EXPECT_EQ(topology.index(Group::kNode, Rank(3)), 1);
  }
  const Topology dealt_out(4, 2, 1, "cluster", {.nodes = {0, 1, 0, 1}});
  EXPECT_EQ(groups(dealt_out, Group::kNode), (Groups{{0, 2}, {1, 3}}));
  EXPECT_THROW(Topology(4, 2, 1, "cluster", {.nodes = {0, 1}}), base::UsageError);
}

TEST(Topology, AShardGroupHasALevelWithinMachinesAndOneAcrossThem) {
  using Groups = std::vector<std::vector<int>>;
  const auto on = [](std::vector<int> nodes, int degree) {
    const int size = static_cast<int>(nodes.size());
    return Topology(size, 1, 1, "cluster", {.shard = degree, .nodes = std::move(nodes)});
  };
  const auto even = on({0, 0, 0, 1, 1, 1}, 6);
  EXPECT_EQ(groups(even, Group::kShardWithin), (Groups{{0, 1, 2}, {3, 4, 5}}));
  EXPECT_EQ(groups(even, Group::kShardAcross), (Groups{{0, 3}, {1, 4}, {2, 5}}));
  EXPECT_EQ(even.size(Group::kShardWithin), 3);
  EXPECT_EQ(even.size(Group::kShardAcross), 2);
  EXPECT_EQ(why_no_levels(even, Rank(4)), "");
  const auto two = on({0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3}, 6);
  EXPECT_EQ(groups(two, Group::kShardAcross), (Groups{{0, 3}, {1, 4}, {2, 5}, {6, 9}, {7, 10}, {8, 11}}));
  EXPECT_EQ(why_no_levels(two, Rank(7)), "");
  const auto uneven = on({0, 0, 1}, 3);
  EXPECT_EQ(groups(uneven, Group::kShardAcross), (Groups{{0, 2}, {1}}));
  EXPECT_EQ(why_no_levels(uneven, Rank(0)), "their machines have 2 and 1 of them");
  EXPECT_EQ(why_no_levels(on({0, 0, 1, 1}, 2), Rank(0)), "they are on one machine");
  EXPECT_EQ(why_no_levels(on({0, 1}, 2), Rank(0)), "each is on a machine of its own");
  EXPECT_EQ(why_no_levels(on({0, 1, 0, 1}, 4), Rank(0)), "ranks of one machine are not neighbours");
}

TEST(Topology, NodesMayHaveDifferentNumbersOfRanks) {
  const Topology topology(5, 1, 1, "cluster", {.nodes = {0, 0, 0, 1, 1}});
  EXPECT_EQ(topology.size(Group::kNode), 3);
  EXPECT_EQ(topology.members(Group::kNode, Rank(4)), (std::vector<Rank>{Rank(3), Rank(4)}));
  EXPECT_EQ(topology.translate(Group::kNode, 1, Rank(3)), Rank(4));
  EXPECT_THROW(topology.translate(Group::kNode, 2, Rank(3)), base::UsageError);
}

TEST(Topology, ReplicasAreTheRanksWithBatchesOfTheirOwn) {
  const Topology each(8, 1, 2), together(8, 1, 2, "cluster", {.one_batch = true});
  EXPECT_EQ(each.members(kReplicas, base::Rank(1)), each.members(Group::kDp, base::Rank(1)));
  EXPECT_EQ(together.members(kReplicas, base::Rank(1)), together.members(Group::kRdp, base::Rank(1)));
  EXPECT_EQ(each.size(kReplicas), 8);
  EXPECT_EQ(together.size(kReplicas), 4);
  EXPECT_EQ(together.index(kReplicas, base::Rank(7)), together.index(Group::kRdp, base::Rank(7)));
}

}  // namespace
}  // namespace lamina::topology
