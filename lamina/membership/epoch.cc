// SPDX-License-Identifier: Apache-2.0
#include "lamina/membership/epoch.h"

#include <algorithm>

#include "lamina/base/joined.h"
#include "lamina/base/str.h"

namespace lamina::membership {

bool Epoch::has(MemberId member) const { return std::ranges::find(members, member) != members.end(); }

std::string Epoch::text() const {
  return base::str("epoch ", number, " of ", members.size(), " members (", base::joined(members), ")");
}

bool is_majority(const Epoch& epoch, const std::set<MemberId>& some) {
  const auto count = std::ranges::count_if(epoch.members, [&](MemberId member) { return some.contains(member); });
  const auto twice = 2 * static_cast<std::size_t>(count);
  if (twice != epoch.members.size()) return twice > epoch.members.size();
  return twice > 0 && some.contains(epoch.members.front());
}

}  // namespace lamina::membership
