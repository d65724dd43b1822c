// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>
#include <rapidcheck.h>
#include <rapidcheck/gtest.h>

#include <map>
#include <set>
#include <string>

#include "lamina/layout/place.h"
#include "tests/layout/any_layout.h"

namespace lamina::layout {
namespace {

using base::Rank;
using topology::Group;
using topology::Topology;

Topology any_topology() {
  const int pp = *rc::gen::inRange(1, 4).as("pp");
  const int tp = *rc::gen::inRange(1, 7).as("tp");
  const int rdp = *rc::gen::inRange(1, 7).as("rdp");
  return Topology(pp * tp * rdp, pp, tp, *rc::gen::element<std::string>("cluster", "spread", "DTP", "PTD").as("order"));
}

int any_divisor(int number) {
  return *rc::gen::suchThat(rc::gen::inRange(1, number + 1), [=](int d) { return number % d == 0; }).as("divisor");
}

ParameterLayout any_layout_over(const Topology& topology) {
  ParameterLayout layout{.name = "w", .shape = any_shape()};
  layout.partition = base::Partition(*rc::gen::inRange(0, topology.size(Group::kPp)).as("partition"));
  const int tp = topology.size(Group::kTp);
  if (!layout.shape.empty()) layout.slicing = any_slicing(layout.shape, any_divisor(tp));
  layout.shards = any_divisor(tp / layout.slices() * topology.size(Group::kRdp));
  return layout;
}

std::optional<Place> place_of(const ParameterLayout& layout, const Topology& topology, int rank) {
  return place(layout, topology, topology.coordinates(Rank(rank)));
}

RC_GTEST_PROP(PlaceProperty, EveryElementHasOneRankThatSavesAndCountsIt, ()) {
  const Topology topology = any_topology();
  const ParameterLayout layout = any_layout_over(topology);
  Elements savers(static_cast<std::size_t>(numel(layout.shape)), 0);
  for (int rank = 0; rank < topology.size(Group::kWorld); ++rank) {
    const auto here = place_of(layout, topology, rank);
    if (!here || here->copy != 0) continue;
    for (std::int64_t element : elements_of(held(layout, here->slice, here->shard))) {
      if (element != kPadding) ++savers.at(static_cast<std::size_t>(element));
    }
  }
  RC_ASSERT(savers == Elements(savers.size(), 1));
}

RC_GTEST_PROP(PlaceProperty, EveryRankOfThePartitionHasAPlaceAndNoOtherRank, ()) {
  const Topology topology = any_topology();
  const ParameterLayout layout = any_layout_over(topology);
  for (int rank = 0; rank < topology.size(Group::kWorld); ++rank) {
    const auto here = place_of(layout, topology, rank);
    RC_ASSERT(here.has_value() == (topology.coordinates(Rank(rank)).pp == layout.partition.value));
    if (here)
      RC_ASSERT(held(layout, topology, topology.coordinates(Rank(rank))) == held(layout, here->slice, here->shard));
  }
}

RC_GTEST_PROP(PlaceProperty, EveryPieceHasAsManyCopies, ()) {
  const Topology topology = any_topology();
  const ParameterLayout layout = any_layout_over(topology);
  std::map<std::pair<int, int>, std::set<int>> copies;
  for (int rank = 0; rank < topology.size(Group::kWorld); ++rank) {
    if (const auto here = place_of(layout, topology, rank)) copies[{here->slice, here->shard}].insert(here->copy);
  }
  RC_ASSERT(copies.size() == pieces(layout).size());
  RC_ASSERT(std::cmp_equal(copies.begin()->second.size(), layout::copies(layout, topology)));
  for (const auto& [piece, numbers] : copies) RC_ASSERT(numbers == copies.begin()->second);
}

RC_GTEST_PROP(PlaceProperty, AShardingGroupIsConsecutiveMembersOfRdpGroup, ()) {
  const Topology topology = any_topology();
  ParameterLayout layout = any_layout_over(topology);
  layout.shards = any_divisor(topology.size(Group::kRdp));
  const Rank first = topology.rank({.pp = static_cast<int>(layout.partition.value)});
  const std::vector<Rank> members = topology.members(Group::kRdp, first);
  for (std::size_t i = 0; i < members.size(); ++i) {
    const Place expected{0, static_cast<int>(i) % layout.shards, static_cast<int>(i) / layout.shards};
    RC_ASSERT(place(layout, topology, topology.coordinates(members[i])) == expected);
  }
}

}  // namespace
}  // namespace lamina::layout
