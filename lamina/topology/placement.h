// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <string_view>

namespace lamina::topology {

// [Note: axes] The ranks of a job form a box with three axes:
//   pipeline  pp   ranks that hold the parts of one model
//   tensor    tp   ranks that hold the slices of one layer
//   replica   rdp  ranks that hold the same parameters
// A model copy spans mp = pp x tp ranks; dp = tp x rdp ranks each read a batch of their own. Five kinds of groups cut
// this further:
//   shard          consecutive ranks of an rdp group, which hold the shards of one set of parameters
//   shard copies   ranks of an rdp group that hold the same shard, one of each shard group
//   node           ranks on one machine, whatever they hold
//   shard within   ranks of a shard group on one machine
//   shard across   ranks of a shard group that have one index within, one of each machine
enum class Axis { kPipeline, kTensor, kReplica };

// The axes in an order: along the first one neighbours are farthest apart in the world, along the last one they are
// adjacent ranks.
using AxisOrder = std::array<Axis, 3>;

// Reads "cluster" (the same as "DPT"), "spread" ("TPD"), or the letters D (replica), P and T in any order; the
// right-most letter has adjacent ranks. Throws ConfigError for anything else.
AxisOrder parse_placement(std::string_view strategy);

}  // namespace lamina::topology
