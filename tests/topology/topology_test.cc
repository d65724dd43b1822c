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

TEST(Topology, ShardingGroupsHaveToDivideTheDataParallelRanks) {
  const Topology topology(8, 2, 2);
  for (int degree : {1, 2, 4}) EXPECT_NO_THROW(require_sharding_fits(topology, degree));
  for (int degree : {0, 3, 8}) EXPECT_THROW(require_sharding_fits(topology, degree), base::ConfigError);
}

}  // namespace
}  // namespace lamina::topology
