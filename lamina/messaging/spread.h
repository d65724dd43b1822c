// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <span>
#include <vector>

#include "lamina/base/ids.h"

namespace lamina::messaging {

// [Note: spreading] A word of a group's first member goes to the others along a binomial tree. The member at place i
// hears it from the one whose place is i without its lowest bit, and tells those at i plus each power of two below that
// bit. So nobody sends it more than log2(n) times, nor is further away from the first one than that.
struct Spread {
  std::optional<base::Rank> from;  // none for the first member
  std::vector<base::Rank> to;      // those first that have most to tell themselves
};

// The place of `rank`, which is a member.
Spread spread(std::span<const base::Rank> members, base::Rank rank);

}  // namespace lamina::messaging
