// SPDX-License-Identifier: Apache-2.0
#include "lamina/membership/keepers.h"

#include <algorithm>
#include <functional>
#include <ranges>
#include <set>
#include <utility>

#include "lamina/base/joined.h"
#include "lamina/base/str.h"

namespace lamina::membership {
namespace {

// Ranks of a version that are gone with all that anybody has of them; none: the version is whole. No value: one that is
// left has not come to it.
std::optional<std::vector<int>> missing(const std::vector<KeptBy>& told, const KeptVersion& version,
                                        const Holdings& holdings) {
  std::set<int> there;
  std::set<std::uint64_t> held;
  for (const auto& here : told) {
    if (version <= here.came_with) continue;
    const auto found = std::ranges::find(here.versions, version, &KeptHere::version);
    if (found == here.versions.end()) return std::nullopt;
    there.insert(found->others.begin(), found->others.end());
    held.insert(holdings.at(static_cast<std::size_t>(found->own)));
  }
  std::vector<int> gone;
  for (int rank = 0; rank < static_cast<int>(holdings.size()); ++rank) {
    if (!there.contains(rank) && !held.contains(holdings[static_cast<std::size_t>(rank)])) gone.push_back(rank);
  }
  return gone;
}

}  // namespace

std::vector<std::optional<int>> keepers_of(const Holdings& holdings, const std::vector<int>& machines) {
  std::map<int, std::vector<int>> ranks;  // by machine
  for (std::size_t rank = 0; rank < machines.size(); ++rank) ranks[machines[rank]].push_back(static_cast<int>(rank));
  const auto size = static_cast<int>(holdings.size());
  std::vector<std::optional<int>> keepers;
  for (int rank = 0; rank < size; ++rank) {
    const auto self = static_cast<std::size_t>(rank);
    const auto has_the_same = [&](int other) {
      const auto at = static_cast<std::size_t>(other);
      return other != rank && holdings[at] == holdings[self] && (ranks.size() == 1 || machines[at] != machines[self]);
    };
    auto& keeper = keepers.emplace_back();
    if (size == 1 || std::ranges::any_of(std::views::iota(0, size), has_the_same)) continue;
    const auto here = ranks.find(machines[self]);
    const auto next = std::next(here) == ranks.end() ? ranks.begin() : std::next(here);
    const auto place = std::ranges::find(here->second, rank) - here->second.begin();
    keeper =
        ranks.size() == 1 ? (rank + 1) % size : next->second[static_cast<std::size_t>(place) % next->second.size()];
  }
  return keepers;
}

WholeVersion newest_whole(const std::vector<KeptBy>& told, const std::map<KeptVersion, Holdings>& holdings) {
  WholeVersion found{.version = {}, .why_not = "no version that all of them have was kept yet"};
  bool is_newest = true;
  for (const auto& [version, held] : std::views::reverse(holdings)) {
    const auto gone = missing(told, version, held);
    if (!gone) continue;
    if (gone->empty()) return {version, ""};
    if (!std::exchange(is_newest, false)) continue;
    found.why_not = base::str("what rank", gone->size() > 1 ? "s " : " ", base::joined(*gone), " of ", held.size(),
                              " had is lost with whoever kept it");
  }
  return found;
}

std::vector<bool> may_leave(const std::vector<KeptBy>& told, const std::vector<bool>& want,
                            const std::map<KeptVersion, Holdings>& holdings) {
  if (std::ranges::all_of(want, std::identity())) return want;
  const auto newest = newest_whole(told, holdings).version;
  std::vector<bool> leave(told.size());
  for (std::size_t rank = 0; rank < told.size(); ++rank) {
    if (!want[rank]) continue;
    leave[rank] = true;
    std::vector<KeptBy> left;
    for (std::size_t other = 0; other < told.size(); ++other) {
      if (!leave[other]) left.push_back(told[other]);
    }
    leave[rank] = newest && newest_whole(left, holdings).version == newest;
  }
  return leave;
}

}  // namespace lamina::membership
