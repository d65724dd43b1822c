// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "lamina/topology/topology.h"

namespace lamina::topology {

// Says which part of a model's copy a partial state has: (partition, partitions, shard, shards, slice, slices), or the
// first of these, where nothing is in shards or slices.
using SavedPlace = std::vector<std::int64_t>;

// This rank's, of whole parameters or `of_shards`.
SavedPlace saved_place(const Topology& topology, base::Rank own, bool of_shards);

// Says what keeps a part that was saved from being loaded in a job of this layout, "" if nothing: shards and slices are
// this rank's alone, and there are as many partitions. An empty place says nothing.
std::string why_elsewhere(std::span<const std::int64_t> saved, const Topology& topology, base::Rank own);

}  // namespace lamina::topology
