// SPDX-License-Identifier: Apache-2.0
#include "lamina/membership/epoch.h"

#include <algorithm>
#include <map>

#include "lamina/base/joined.h"
#include "lamina/base/str.h"

namespace lamina::membership {

bool Epoch::has(MemberId member) const { return std::ranges::find(members, member) != members.end(); }

std::string Epoch::text() const {
  return base::str("epoch ", number, " of ", members.size(), " members (", base::joined(members), ")");
}

bool is_majority(const Epoch& epoch, const std::set<MemberId>& some) {
  const auto all = epoch.members.size();
  const auto count = static_cast<std::size_t>(
      std::ranges::count_if(epoch.members, [&](MemberId member) { return some.contains(member); }));
  if (epoch.with_witness > 0) {
    return some.contains(kWitness) ? count >= epoch.with_witness : count > all - epoch.with_witness;
  }
  if (2 * count != all) return 2 * count > all;
  return count > 0 && some.contains(epoch.members.front());
}

std::size_t enough_with_witness(const std::vector<int>& machines) {
  std::map<int, std::size_t> sizes;
  for (const int machine : machines) ++sizes[machine];
  std::size_t enough = machines.size() / 2;
  for (const auto& [machine, size] : sizes) enough = std::min(enough, size);
  return std::max<std::size_t>(enough, 1);
}

}  // namespace lamina::membership
