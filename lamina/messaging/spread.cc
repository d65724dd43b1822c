// SPDX-License-Identifier: Apache-2.0
#include "lamina/messaging/spread.h"

#include <algorithm>
#include <bit>

#include "lamina/base/error.h"

namespace lamina::messaging {

Spread spread(std::span<const base::Rank> members, base::Rank rank) {
  const auto place = static_cast<std::size_t>(std::ranges::find(members, rank) - members.begin());
  base::internal_check(place < members.size(), "a word is spread in a group that this rank is no member of");
  Spread found;
  const auto lowest = place == 0 ? std::bit_ceil(members.size()) : place & -place;
  if (place != 0) found.from = members[place - lowest];
  for (auto step = lowest / 2; step > 0; step /= 2) {
    if (place + step < members.size()) found.to.push_back(members[place + step]);
  }
  return found;
}

}  // namespace lamina::messaging
