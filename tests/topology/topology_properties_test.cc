// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>
#include <rapidcheck.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <string>

#include "lamina/topology/topology.h"

namespace lamina::topology {
namespace {

using base::Rank;

constexpr std::array kGroups{Group::kWorld, Group::kMp,    Group::kDp,          Group::kPp,          Group::kTp,
                             Group::kRdp,   Group::kShard, Group::kShardWithin, Group::kShardAcross, Group::kNode};
constexpr std::array kByMachine{Group::kShardWithin, Group::kShardAcross, Group::kNode};

Topology any_topology() {
  const int pp = *rc::gen::inRange(1, 6).as("pp");
  const int tp = *rc::gen::inRange(1, 6).as("tp");
  const int rdp = *rc::gen::inRange(1, 6).as("rdp");
  const auto strategy =
      *rc::gen::element<std::string>("cluster", "spread", "DPT", "DTP", "PDT", "PTD", "TDP", "TPD").as("strategy");
  std::vector<int> divisors;
  for (int degree = 1; degree <= rdp; ++degree) {
    if (rdp % degree == 0) divisors.push_back(degree);
  }
  const auto machines = rc::gen::container<std::vector<int>>(pp * tp * rdp, rc::gen::inRange(0, 3));
  return Topology(pp * tp * rdp, pp, tp, strategy,
                  {.shard = *rc::gen::elementOf(divisors).as("shard"), .nodes = *machines.as("nodes")});
}

Rank any_rank(const Topology& topology) { return Rank(*rc::gen::inRange(0, topology.size(Group::kWorld)).as("rank")); }

RC_GTEST_PROP(TopologyProperty, CoordinatesAndRanksAreOneToOne, ()) {
  const Topology topology = any_topology();
  const Rank rank = any_rank(topology);
  RC_ASSERT(topology.rank(topology.coordinates(rank)) == rank);
}

RC_GTEST_PROP(TopologyProperty, SizesMultiply, ()) {
  const Topology topology = any_topology();
  const auto size = [&](Group group) { return topology.size(group); };
  RC_ASSERT(size(Group::kPp) * size(Group::kDp) == size(Group::kWorld));
  RC_ASSERT(size(Group::kMp) * size(Group::kRdp) == size(Group::kWorld));
  RC_ASSERT(size(Group::kPp) * size(Group::kTp) == size(Group::kMp));
  RC_ASSERT(size(Group::kTp) * size(Group::kRdp) == size(Group::kDp));
}

RC_GTEST_PROP(TopologyProperty, TheShardsOfAParameterAreCopiesOfTheSamePart, ()) {
  const Topology topology = any_topology();
  const Rank rank = any_rank(topology);
  const auto copies = topology.members(Group::kRdp, rank);
  const auto shards = topology.members(Group::kShard, rank);
  const auto found = std::ranges::search(copies, shards);
  RC_ASSERT(!found.empty());
  RC_ASSERT((found.begin() - copies.begin()) % topology.size(Group::kShard) == 0);
}

RC_GTEST_PROP(TopologyProperty, GroupsOfAKindPartitionTheWorld, ()) {
  const Topology topology = any_topology();
  for (Group group : kGroups) {
    std::vector<Rank> seen;
    for (int rank = 0; rank < topology.size(Group::kWorld); ++rank) {
      const auto members = topology.members(group, Rank(rank));
      const int size = static_cast<int>(members.size());  // which machines differ in
      const int most = topology.size(group);
      RC_ASSERT(size == most || (std::ranges::find(kByMachine, group) != kByMachine.end() && size < most));
      for (Rank member : members) RC_ASSERT(topology.members(group, member) == members);
      if (members.front() == Rank(rank)) seen.insert(seen.end(), members.begin(), members.end());
    }
    std::sort(seen.begin(), seen.end());
    RC_ASSERT(static_cast<int>(seen.size()) == topology.size(Group::kWorld));
    RC_ASSERT(std::adjacent_find(seen.begin(), seen.end()) == seen.end());
  }
}

RC_GTEST_PROP(TopologyProperty, GroupOrderIsTheOrderOfTheCoordinate, ()) {
  const Topology topology = any_topology();
  const Rank rank = any_rank(topology);
  const Coordinates place = topology.coordinates(rank);
  RC_ASSERT(topology.index(Group::kPp, rank) == place.pp);
  RC_ASSERT(topology.index(Group::kTp, rank) == place.tp);
  RC_ASSERT(topology.index(Group::kRdp, rank) == place.rdp);
  RC_ASSERT(topology.index(Group::kWorld, rank) == rank.value);
}

RC_GTEST_PROP(TopologyProperty, TranslateIsTheInverseOfIndex, ()) {
  const Topology topology = any_topology();
  const Rank rank = any_rank(topology);
  for (Group group : kGroups) {
    RC_ASSERT(topology.translate(group, topology.index(group, rank), rank) == rank);
  }
}

RC_GTEST_PROP(TopologyProperty, AModelCopyAndItsReplicasMeetInOneRank, ()) {
  const Topology topology = any_topology();
  const Rank rank = any_rank(topology);
  const auto meet = [&](Group a, Group b) {
    const auto in_a = topology.members(a, rank);
    const auto in_b = topology.members(b, rank);
    std::vector<Rank> both;
    std::set_intersection(in_a.begin(), in_a.end(), in_b.begin(), in_b.end(), std::back_inserter(both));
    return both;
  };
  RC_ASSERT(meet(Group::kMp, Group::kRdp) == std::vector<Rank>{rank});
  RC_ASSERT(meet(Group::kPp, Group::kDp) == std::vector<Rank>{rank});
  RC_ASSERT(meet(Group::kMp, Group::kDp) == topology.members(Group::kTp, rank));
}

}  // namespace
}  // namespace lamina::topology
