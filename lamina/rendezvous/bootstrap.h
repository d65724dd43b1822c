// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include "lamina/base/ids.h"
#include "lamina/rendezvous/switchboard.h"

namespace lamina::rendezvous {

// [Note: generation] The processes of a job may join several times (init, shutdown, init). Each time has a name of its
// own, the same on all ranks. It is made of the job's run id, torchrun's restart count, LAMINA_EPOCH, a counter and a
// random number of rank 0's. So the entries of one time in the store, its signatures and its keys are apart from every
// other.
struct JoinOptions {
  base::Rank rank;
  int size = 1;
  std::string master_addr;
  int master_port = 0;
  // Texts that must be alike on all ranks, or they refuse each other:
  std::string configuration;
  std::string wire_version;  // of the format of the messages that they are to exchange
  // Opaque: where messages to this rank go, for each rank. Called once, when it is known where all ranks are
  // ([Note: place]).
  std::function<std::vector<std::string>(const std::vector<std::string>& places)> wire_addresses;
  std::vector<base::Rank> neighbours;  // those to connect with at once, as they do with us; the others at first use
  std::chrono::seconds timeout{300};
  std::function<void()> check_interrupt;  // called at least every 200 ms; may throw, which ends the join
};

// Meets the other ranks at the job's store and connects the liveness sockets to its neighbours. When it returns, on any
// rank, rank 0 has let the store go and no rank uses it any more, so that a script may use the same port as if we had
// not. Throws base::TimeoutError that names the ranks which did not join. base::ConfigError comes on all ranks when
// versions, configurations or numbers of ranks differ, and names two ranks and the difference. It also comes in a
// process whose rank another one has already, where a rank has no secret or another one than we, and where its words
// were changed on the way.
Joined join(const JoinOptions& options);

}  // namespace lamina::rendezvous
