// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>

#include "lamina/base/ids.h"
#include "lamina/layout/parameter_layout.h"
#include "lamina/topology/topology.h"

namespace lamina::layout {

// A rank's part of a parameter: a copy of a piece.
struct Place {
  int slice = 0;
  int shard = 0;
  int copy = 0;  // of all ranks that hold this piece, copy 0 saves it and counts it in a norm

  friend bool operator==(const Place&, const Place&) = default;
};

// [Note: holders] The ranks of a partition, on the two other axes of the topology. Consecutive tensor ranks share a
// slice if there are fewer slices than tensor ranks (without slicing: all of them). The ranks of a slice are counted
// along their RDP_GROUP, then along their TP_GROUP; shards go round over them, so that a sharding group is `shards`
// consecutive ranks, and each shard has as many copies. Example: tp 2, four replicas, two shards, not sliced:
//
//   rdp            0        1        2        3
//   tp 0        shard 0  shard 1  shard 0  shard 1      copies 0 0 1 1
//   tp 1        shard 0  shard 1  shard 0  shard 1      copies 2 2 3 3
//
// With 8 shards every rank has one of its own. Gradients are reduced and scattered over the ranks of one copy, and
// shards then reduced over their copies.

// The place of the rank at these coordinates; none when the parameter is of another partition. Throws ConfigError when
// the layout does not fit the topology (a partition, or degrees that do not divide the ranks), UsageError when there
// is no such rank.
std::optional<Place> place(const ParameterLayout& layout, const topology::Topology& topology, topology::Coordinates at);

// The piece of the rank at these coordinates; none, and throws, as `place` does.
std::optional<Region> held(const ParameterLayout& layout, const topology::Topology& topology, topology::Coordinates at);

// How many ranks hold each piece. Throws ConfigError as `place` does.
int copies(const ParameterLayout& layout, const topology::Topology& topology);

}  // namespace lamina::layout
