// SPDX-License-Identifier: Apache-2.0
#include "lamina/layout/place.h"

#include <string>

#include "lamina/base/error.h"
#include "lamina/base/str.h"

namespace lamina::layout {
namespace {

using base::str;
using topology::Group;

// The ranks that hold a slice: so many neighbours on the tensor axis, each with all of its replicas.
struct Holders {
  int tp = 1;
  int rdp = 1;
};

Holders holders_of_a_slice(const ParameterLayout& layout, const topology::Topology& topology) {
  check(layout);
  const int pp = topology.size(Group::kPp);
  const int tp = topology.size(Group::kTp);
  const int rdp = topology.size(Group::kRdp);
  std::string problem;
  if (layout.partition.value >= pp) {
    problem = str("partition ", layout.partition, " of ", pp);
  } else if (tp % layout.slices() != 0) {
    problem = str(layout.slices(), " slices over ", tp, " tensor-parallel ranks");
  } else if (tp / layout.slices() * rdp % layout.shards != 0) {
    problem = str(layout.shards, " shards over the ", tp / layout.slices() * rdp, " ranks that hold a slice");
  }
  if (!problem.empty()) {
    throw base::ConfigError(str("the layout of ", layout.name, " does not fit the ranks: ", problem));
  }
  return {tp / layout.slices(), rdp};
}

}  // namespace

std::optional<Place> place(const ParameterLayout& layout, const topology::Topology& topology,
                           topology::Coordinates at) {
  const Holders holders = holders_of_a_slice(layout, topology);
  topology.rank(at);  // throws when there is none
  if (at.pp != layout.partition.value) return std::nullopt;
  const int index = at.tp % holders.tp * holders.rdp + at.rdp;
  return Place{at.tp / holders.tp, index % layout.shards, index / layout.shards};
}

std::optional<Region> held(const ParameterLayout& layout, const topology::Topology& topology,
                           topology::Coordinates at) {
  const auto here = place(layout, topology, at);
  return here ? std::optional(held(layout, here->slice, here->shard)) : std::nullopt;
}

int copies(const ParameterLayout& layout, const topology::Topology& topology) {
  const Holders holders = holders_of_a_slice(layout, topology);
  return holders.tp * holders.rdp / layout.shards;
}

}  // namespace lamina::layout
