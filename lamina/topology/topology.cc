// SPDX-License-Identifier: Apache-2.0
#include "lamina/topology/topology.h"

#include <algorithm>
#include <cstdint>
#include <map>
#include <ranges>
#include <utility>

#include "lamina/base/error.h"
#include "lamina/base/str.h"

namespace lamina::topology {
namespace {

using base::ConfigError;
using base::Rank;
using base::str;
using base::UsageError;

constexpr std::size_t at(Axis axis) { return static_cast<std::size_t>(axis); }

// Which axes a group of this kind runs along.
struct RankSpan {
  bool pp = false;
  bool tp = false;
  bool rdp = false;
};

RankSpan span_of(Group group) {
  switch (group) {
    case Group::kWorld:
      return {true, true, true};
    case Group::kMp:
      return {true, true, false};
    case Group::kDp:
      return {false, true, true};
    case Group::kPp:
      return {true, false, false};
    case Group::kTp:
      return {false, true, false};
    case Group::kRdp:
    case Group::kShard:        // a part of it
    case Group::kShardCopies:  // the same
    case Group::kShardWithin:
    case Group::kShardAcross:
      return {false, false, true};
    case Group::kNode:  // part of the world
      return {true, true, true};
    case Group::kReplicas:
      break;  // resolved before
  }
  throw base::InternalError("no such kind of group");
}

void require_shards_fit(int degree, int rdp) {
  if (degree >= 1 && rdp % degree == 0) return;
  throw ConfigError(str("sharded_data_parallel_degree: ", degree, " is not allowed with ", rdp,
                        rdp == 1 ? " rank that holds" : " ranks that hold",
                        " the same parameters; expected a divisor of ", rdp));
}

void require_fits(int world_size, int pp, int tp) {
  if (world_size < 1 || pp < 1 || tp < 1) {
    throw ConfigError(str("a job of ", world_size, " processes with partitions: ", pp,
                          " and tensor_parallel_degree: ", tp, " is not allowed; expected at least 1 of each"));
  }
  const std::int64_t copy = std::int64_t{pp} * tp;
  if (world_size % copy == 0) return;
  throw ConfigError(str("partitions: ", pp, " times tensor_parallel_degree: ", tp, " is ", copy,
                        ", which does not divide the ", world_size, " processes of this job; expected ", copy,
                        " processes or a multiple of that, or other degrees"));
}

}  // namespace

Topology::Topology(int world_size, int pp, int tp, std::string_view placement_strategy, Cuts cuts)
    : size_(world_size), cuts_(std::move(cuts)) {
  require_fits(world_size, pp, tp);
  const AxisOrder order = parse_placement(placement_strategy);
  extent_[at(Axis::kPipeline)] = pp;
  extent_[at(Axis::kTensor)] = tp;
  extent_[at(Axis::kReplica)] = world_size / (pp * tp);
  int stride = 1;
  for (auto axis = order.rbegin(); axis != order.rend(); ++axis) {
    stride_[at(*axis)] = stride;
    stride *= extent_[at(*axis)];
  }
  require_shards_fit(cuts_.shard, extent_[at(Axis::kReplica)]);
  if (cuts_.nodes.empty()) cuts_.nodes.resize(size_);
  if (std::cmp_not_equal(cuts_.nodes.size(), size_)) {
    throw UsageError(str("the machines of ", cuts_.nodes.size(), " ranks, in a job of ", size_));
  }
}

Group Topology::resolved(Group group) const {
  if (group != Group::kReplicas) return group;
  return cuts_.one_batch ? Group::kRdp : Group::kDp;
}

int Topology::size(Group group) const {
  if (group == Group::kShard) return cuts_.shard;
  if (group == Group::kShardCopies) return extent_[at(Axis::kReplica)] / cuts_.shard;
  if (group == Group::kNode) {
    std::map<int, int> ranks;
    for (const int node : cuts_.nodes) ++ranks[node];
    return std::ranges::max(ranks | std::views::values);
  }
  if (group == Group::kShardWithin || group == Group::kShardAcross) {
    std::size_t most = 0;
    for (int rank = 0; rank < size_; ++rank) most = std::max(most, members(group, Rank(rank)).size());
    return static_cast<int>(most);
  }
  const RankSpan span = span_of(resolved(group));
  return (span.pp ? extent_[at(Axis::kPipeline)] : 1) * (span.tp ? extent_[at(Axis::kTensor)] : 1) *
         (span.rdp ? extent_[at(Axis::kReplica)] : 1);
}

Rank Topology::rank(Coordinates place) const {
  const std::array<int, 3> along{place.pp, place.tp, place.rdp};  // by Axis
  int rank = 0;
  for (std::size_t axis = 0; axis < along.size(); ++axis) {
    if (along[axis] < 0 || along[axis] >= extent_[axis]) {
      throw UsageError(str("there is no rank at pp ", place.pp, ", tp ", place.tp, ", rdp ", place.rdp,
                           "; the sizes are ", extent_[0], ", ", extent_[1], " and ", extent_[2]),
                       base::Code{"group-no-rank"});
    }
    rank += along[axis] * stride_[axis];
  }
  return Rank(rank);
}

Coordinates Topology::coordinates(Rank rank) const {
  if (rank.value < 0 || rank.value >= size_) {
    throw UsageError(str("there is no rank ", rank, " in a job of ", size_, " processes"), base::Code{"group-no-rank"});
  }
  const auto along = [&](Axis axis) { return static_cast<int>(rank.value) / stride_[at(axis)] % extent_[at(axis)]; };
  return {along(Axis::kPipeline), along(Axis::kTensor), along(Axis::kReplica)};
}

std::vector<Rank> Topology::members(Group group, Rank of) const {
  if (group == Group::kShardAcross) return across_machines(of);
  const Coordinates own = coordinates(of);
  const RankSpan span = span_of(resolved(group));
  std::vector<Rank> members;
  for (int i = 0; i < size_; ++i) {
    const Coordinates other = coordinates(Rank(i));
    const bool beside =
        (span.pp || other.pp == own.pp) && (span.tp || other.tp == own.tp) && (span.rdp || other.rdp == own.rdp);
    if (beside && !cut_apart(group, of, Rank(i))) members.push_back(Rank(i));
  }
  return members;
}

bool Topology::cut_apart(Group group, Rank one, Rank other) const {
  if (group == Group::kNode) return cuts_.nodes[one.value] != cuts_.nodes[other.value];
  const int first = coordinates(one).rdp, second = coordinates(other).rdp;
  if (group == Group::kShard) return first / cuts_.shard != second / cuts_.shard;
  if (group == Group::kShardWithin) return cut_apart(Group::kShard, one, other) || cut_apart(Group::kNode, one, other);
  return group == Group::kShardCopies && first % cuts_.shard != second % cuts_.shard;
}

std::vector<Rank> Topology::across_machines(Rank of) const {
  const int own = index(Group::kShardWithin, of);
  std::map<int, int> met;  // members on each machine
  std::vector<Rank> found;
  for (const Rank member : members(Group::kShard, of)) {
    if (met[cuts_.nodes[member.value]]++ == own) found.push_back(member);
  }
  return found;
}

int Topology::index(Group group, Rank of) const {
  const std::vector<Rank> all = members(group, of);
  return static_cast<int>(std::find(all.begin(), all.end(), of) - all.begin());
}

Rank Topology::translate(Group group, int index, Rank of) const {
  const std::vector<Rank> all = members(group, of);
  const int count = static_cast<int>(all.size());
  if (index < 0 || index >= count) {
    throw UsageError(
        str("there is no member ", index, " in ", name(group), ", which has ", count, "; expected 0 to ", count - 1),
        base::Code{"group-no-rank"});
  }
  return all[static_cast<std::size_t>(index)];
}

namespace {

bool on_one_machine(const Topology& topology, int world_size, Group group) {
  for (int rank = 0; rank < world_size; ++rank) {
    const auto beside = topology.members(Group::kNode, Rank(rank));
    const auto is_beside = [&](Rank member) { return std::ranges::find(beside, member) != beside.end(); };
    if (!std::ranges::all_of(topology.members(group, Rank(rank)), is_beside)) return false;
  }
  return true;
}

}  // namespace

std::vector<std::string> placements_on_one_machine(const Topology& topology, int world_size, Group group) {
  if (on_one_machine(topology, world_size, group)) return {};
  Cuts cuts{.shard = topology.size(Group::kShard)};
  for (int rank = 0; rank < world_size; ++rank) {
    cuts.nodes.push_back(static_cast<int>(topology.members(Group::kNode, Rank(rank)).front().value));
  }
  std::vector<std::string> found;
  for (const auto* strategy : {"cluster", "spread", "DTP", "PDT", "PTD", "TDP"}) {
    const Topology other(world_size, topology.size(Group::kPp), topology.size(Group::kTp), strategy, cuts);
    if (on_one_machine(other, world_size, group)) found.emplace_back(strategy);
  }
  return found;
}

std::string why_no_levels(const Topology& topology, Rank of) {
  const auto members = topology.members(Group::kShard, of);
  const auto within = [&](Rank member) { return std::ssize(topology.members(Group::kShardWithin, member)); };
  const auto first = within(of);
  if (first == std::ssize(members)) return "they are on one machine";
  for (const Rank member : members) {
    if (within(member) != first) return str("their machines have ", first, " and ", within(member), " of them");
  }
  if (first == 1) return "each is on a machine of its own";
  for (std::size_t i = 0; i < members.size(); ++i) {
    if (std::cmp_not_equal(topology.index(Group::kShardWithin, members[i]), i % first)) {
      return "ranks of one machine are not neighbours";
    }
  }
  return "";
}

std::string_view name(Group group) {
  switch (group) {
    case Group::kWorld:
      return "WORLD";
    case Group::kMp:
      return "MP_GROUP";
    case Group::kDp:
      return "DP_GROUP";
    case Group::kPp:
      return "PP_GROUP";
    case Group::kTp:
      return "TP_GROUP";
    case Group::kRdp:
      return "RDP_GROUP";
    case Group::kShard:
      return "SHARD_GROUP";
    case Group::kShardCopies:
      return "SHARD_COPIES_GROUP";
    case Group::kShardWithin:
      return "SHARD_WITHIN_GROUP";
    case Group::kShardAcross:
      return "SHARD_ACROSS_GROUP";
    case Group::kNode:
      return "NODE_GROUP";
    case Group::kReplicas:
      return "the replicas";
  }
  throw base::InternalError("no such kind of group");
}

}  // namespace lamina::topology
