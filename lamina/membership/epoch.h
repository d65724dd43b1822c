// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "lamina/base/ids.h"

namespace lamina::membership {

// A process of the job: for as long as it lives, and never another's.
using MemberId = base::Id<struct MemberTag>;

// A stretch of a job's life in which the same processes are its ranks.
struct Epoch {
  std::int64_t number = 0;
  std::vector<MemberId> members;  // in the order of their ranks, each once

  bool has(MemberId member) const;
  // "epoch 3 of 2 members (0, 4)"
  std::string text() const;
  friend bool operator==(const Epoch&, const Epoch&) = default;
};

// True for more than half of the members, and for half of them with the first. Of two such sets each has a member of
// the other: so what either must agree to happens once.
bool is_majority(const Epoch& epoch, const std::set<MemberId>& some);

}  // namespace lamina::membership
