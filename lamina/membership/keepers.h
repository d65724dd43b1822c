// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <compare>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace lamina::membership {

// [Note: kept states] What a rank alone has is lost with it, unless another one has a copy. So every few updates each
// rank copies its parts, a *version*, and sends what it would write of them to its keeper. A rank whose parts another
// one has, too, needs none: they have the same *holding*, a hash of what their parts are.
//
// Nobody may give a version up before a later one is everywhere. So a version begins when all ranks meet, who have what
// they keep for others of the one before by then. Who has left that meeting knows that the one before is whole, and
// keeps two from then on: that, and the one that begins. Who has not left it still has the two before. The two
// have one in common, wherever a rank is lost.

// The state after so many updates, as the ranks of an epoch have it. Later ones are greater.
struct KeptVersion {
  std::int64_t epoch = 0, updates = 0;

  friend auto operator<=>(const KeptVersion&, const KeptVersion&) = default;
};

// Parts of a version that a rank has: its own, as the rank that it was then, and those of others.
struct KeptHere {
  KeptVersion version;
  int own = 0;
  std::vector<int> others;
};

// Parts that a rank has, of each version that it knows. One that came to the job has none of the version with which it
// came, and of older ones: nobody waits for it there.
struct KeptBy {
  std::vector<KeptHere> versions;
  KeptVersion came_with = {-1, -1};  // as of one that has been there from the beginning

  bool has_come() const { return came_with.epoch >= 0; }
};
inline constexpr KeptVersion kLaterThanAll{INT64_MAX, INT64_MAX};

using Holdings = std::vector<std::uint64_t>;  // of each rank

// The keeper of each rank: on the machine that follows its own, where there are several, and else the next rank. None
// where another rank, on another machine where there are several, has the same parts. `machines`: of each rank.
std::vector<std::optional<int>> keepers_of(const Holdings& holdings, const std::vector<int>& machines);

// The newest version that is whole: each rank that is left has its own parts of it, and those of each other rank are
// with a keeper or with one that has the same. Else why there is none, a clause.
struct WholeVersion {
  std::optional<KeptVersion> version;
  std::string why_not;
};
// `told`: by each rank that is left, what it has. `holdings`: of the versions that this one has.
WholeVersion newest_whole(const std::vector<KeptBy>& told, const std::map<KeptVersion, Holdings>& holdings);

// Says who of those that want to leave may do so at once: all of them, where nobody stays. Else the newest version is
// whole without those, and the others leave an epoch later. `told`: as above, by all ranks.
std::vector<bool> may_leave(const std::vector<KeptBy>& told, const std::vector<bool>& want,
                            const std::map<KeptVersion, Holdings>& holdings);

}  // namespace lamina::membership
