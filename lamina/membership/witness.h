// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <optional>

#include "lamina/membership/epoch_word.h"

namespace lamina::membership {

// [Note: witness] Of two machines that lack each other neither knows whether the other one is lost, or only the network
// between them. So without a third voice the one with the first rank goes on, and the loss of that machine ends the
// job. A witness is that voice: a process on a third machine, without ranks. It accepts or refuses what members propose
// as each of them does (Paxos), so the first side that has its voice goes on, and the other one is told so when it
// asks. A side that is no majority without it asks a moment later: where both live the larger one is to go on.
//
// The witness may be lost, too. Who has lost it gives it up, and says so, which the others then do as well. Once all
// members have, nobody can get its voice any more in this epoch, so majorities are those of a job without one. A member
// that takes part in a ballot already does not give it up: it might be one of those who have decided with it.
//
// Members of one epoch may speak in two sessions, where some have left the session before and others have not yet.
// Words of the two do not mix, so the witness answers those who have asked first.
//
// It forgets all when it ends. Its lines to the members end with it, and they never open others: so no vote is given
// twice.
class Witness {
 public:
  // Its answer to a member that asks or proposes, in that session. None: it has answered others of this epoch, in
  // another one.
  std::optional<EpochWord> answer(std::int64_t session, const EpochWord& word);

 private:
  struct Vote {
    std::int64_t session;
    Acceptor acceptor;
  };
  std::map<std::int64_t, Vote> votes_;  // by the number of the epoch
};

}  // namespace lamina::membership
