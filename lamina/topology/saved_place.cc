// SPDX-License-Identifier: Apache-2.0
#include "lamina/topology/saved_place.h"

#include <utility>

#include "lamina/base/str.h"

namespace lamina::topology {
namespace {

using Ordinal = std::pair<std::int64_t, std::int64_t>;  // which, of how many

Ordinal part(const Topology& topology, Group group, base::Rank own) {
  return {topology.index(group, own), topology.size(group)};
}

Ordinal nth(std::span<const std::int64_t> saved, std::size_t place) {
  return saved.size() < 2 * place + 2 ? Ordinal(0, 1) : Ordinal(saved[2 * place], saved[2 * place + 1]);
}

std::string told(const char* what, const Ordinal& part) {
  return base::str(what, " ", part.first, " of ", part.second);
}

std::string refusal(const char* how, const char* what, const Ordinal& saved, const Ordinal& here, const char* to) {
  return base::str("this partial state dict was saved ", how, " ", told(what, saved), ", and this rank has ",
                   told(what, here), ": a state is carried over to ", to, " whole, by state_dict(), in C++ by save()");
}

}  // namespace

SavedPlace saved_place(const Topology& topology, base::Rank own, bool of_shards) {
  const auto partition = part(topology, kPartitions, own), slice = part(topology, Group::kTp, own);
  const auto shard = of_shards ? part(topology, Group::kShard, own) : Ordinal(0, 1);
  return {partition.first, partition.second, shard.first, shard.second, slice.first, slice.second};
}

std::string why_elsewhere(std::span<const std::int64_t> saved, const Topology& topology, base::Rank own) {
  if (saved.empty()) return "";
  const auto partition = nth(saved, 0), shard = nth(saved, 1), slice = nth(saved, 2);
  if (const auto here = part(topology, Group::kTp, own); slice != here) {
    return refusal("with", "slice", slice, here, "another tensor_parallel_degree");
  }
  if (const auto here = part(topology, Group::kShard, own); shard.second > 1 && shard != here) {
    return refusal("with", "shard", shard, here, "other shards");
  }
  if (const auto here = part(topology, kPartitions, own); partition.second != here.second) {
    return refusal("by", "partition", partition, here, "another number of partitions");
  }
  return "";
}

}  // namespace lamina::topology
