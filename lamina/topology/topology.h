// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <string>
#include <string_view>
#include <vector>

#include "lamina/base/ids.h"
#include "lamina/topology/placement.h"

namespace lamina::topology {

// The sets of ranks that work together; see [Note: axes]. A rank is in exactly one group of each kind. The kinds also
// name a way to count ranks: the dp_rank of a rank is its index in its kDp group.
enum class Group {
  kWorld,
  kMp,
  kDp,
  kPp,
  kTp,
  kRdp,
  kShard,
  kShardCopies,
  kShardWithin,
  kShardAcross,
  kNode,
  kReplicas  // kDp or kRdp, as `Topology::resolved` says
};

// [Note: groups by meaning] Who asks for ranks by what they do together names one of these: it is said here alone which
// axes that spans.
inline constexpr Group kOneCopy = Group::kMp;         // have one copy of the model together
inline constexpr Group kPartitions = Group::kPp;      // have one partition of a copy each
inline constexpr Group kReplicas = Group::kReplicas;  // read batches of their own, and average their gradients
inline constexpr Group kSameParts = Group::kRdp;      // have the same parts of the model, in copies of it

// The position of a rank on each axis.
struct Coordinates {
  int pp = 0;
  int tp = 0;
  int rdp = 0;

  friend bool operator==(const Coordinates&, const Coordinates&) = default;
};

// How the ranks are cut besides the axes.
struct Cuts {
  int shard = 1;           // how many replicas, neighbours on their axis, hold the shards of one set of parameters
  bool one_batch = false;  // the ranks of a kTp group read one batch together, not each its own
  std::vector<int> nodes;  // the number of the machine of each rank; empty: there is one machine
};

// Which rank is where. Every rank builds the same one from the same numbers; nothing is communicated. Immutable.
class Topology {
 public:
  // The replicas are what remains: rdp = world_size / (pp * tp). Throws ConfigError when that is no integer, with the
  // numbers and those that would do. It also comes for an unknown placement strategy (see `parse_placement`), when the
  // replicas cannot be cut into groups of `cuts.shard`, and when `cuts.nodes` are not those of all ranks.
  Topology(int world_size, int pp, int tp, std::string_view placement_strategy = "cluster", Cuts cuts = {});

  // The axis that ranks of this kind are on: kReplicas is kDp where each rank reads a batch of its own.
  Group resolved(Group group) const;

  // How many ranks a group has; the largest, where machines have different numbers of ranks.
  int size(Group group) const;

  // The world rank at these coordinates, and back. Throw UsageError when there is no such place.
  base::Rank rank(Coordinates at) const;
  Coordinates coordinates(base::Rank rank) const;

  // The world ranks in the group of that kind which `of` belongs to, ascending: the group's own order.
  std::vector<base::Rank> members(Group group, base::Rank of) const;

  // The position of `of` among these members: its pp_rank, dp_rank, ...
  int index(Group group, base::Rank of) const;

  // The world rank of member `index` of the group which `of` belongs to. Throws UsageError when there is none.
  base::Rank translate(Group group, int index, base::Rank of) const;

 private:
  bool cut_apart(Group group, base::Rank one, base::Rank other) const;  // by `cuts_`, in a group of that kind
  std::vector<base::Rank> across_machines(base::Rank of) const;         // in its kShard group

  int size_;
  std::array<int, 3> extent_{};  // by Axis
  std::array<int, 3> stride_{};  // by Axis: the distance in the world between neighbours on it
  Cuts cuts_;
};

// The placement strategies under which each group of this kind is on one machine, on the machines of these ranks and
// with these degrees. Empty where it is so already, or never.
std::vector<std::string> placements_on_one_machine(const Topology& topology, int world_size, Group group);

// Says why the kShard group of `of` cannot work by the levels kShardWithin and kShardAcross, where member h * k + i is
// member i of the k on machine h: "" where it can. "they are on one machine", "their machines have 2 and 1 of them".
std::string why_no_levels(const Topology& topology, base::Rank of);

// As it stands in messages: "PP_GROUP".
std::string_view name(Group group);

}  // namespace lamina::topology
