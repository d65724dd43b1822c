// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "lamina/base/ids.h"

namespace lamina::membership {

// A process of the job: for as long as it lives, and never another's.
using MemberId = base::Id<struct MemberTag>;

// The witness of a job: a voice besides those of the members ([Note: witness] in witness.h).
inline constexpr MemberId kWitness = MemberId(-2);

// A stretch of a session's life in which the same processes are its ranks.
struct Epoch {
  std::int64_t number = 0;
  std::vector<MemberId> members;  // in the order of their ranks, each once
  std::size_t with_witness = 0;   // so many are a majority together with the witness; 0: there is none
  bool is_over = false;           // the session that all have opened beside this one begins in its place

  bool has(MemberId member) const;
  // "epoch 3 of 2 members (0, 4)"
  std::string text() const;
  friend bool operator==(const Epoch&, const Epoch&) = default;
};

// True for more than half of the members, and for half of them with the first. Where there is a witness: for
// `with_witness` members together with it, and for so many without it that fewer are left. Of two such sets each has a
// member of the other, or both have the witness: so what either must agree to happens once.
bool is_majority(const Epoch& epoch, const std::set<MemberId>& some);

// As many as the smallest machine has, and half of all at most: then any machine goes on with the witness, and a loss
// of fewer needs no witness. `machines`: of each member.
std::size_t enough_with_witness(const std::vector<int>& machines);

}  // namespace lamina::membership
