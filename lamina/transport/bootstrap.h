// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include "lamina/base/ids.h"
#include "lamina/transport/liveness.h"
#include "lamina/transport/secret.h"

namespace lamina::transport {

// [Note: generation] The processes of a job may join several times (init, shutdown, init). Each time has a name of its
// own, the same on all ranks, made of the job's run id, torchrun's restart count and a counter: it keeps what one time
// leaves in the store, and its frames, apart from the next.
struct JoinOptions {
  base::Rank rank;
  int size = 1;
  std::string master_addr;
  int master_port = 0;
  std::string configuration;  // must be the same text on all ranks
  std::string wire_address;   // opaque: where messages to this rank go
  std::chrono::seconds timeout{300};
  std::function<void()> check_interrupt;  // called at least every 200 ms; may throw, which ends the join
};

// What a rank knows when all ranks have joined.
struct Joined {
  Secret secret{};
  std::string generation;
  std::vector<std::string> wire_addresses;  // of all ranks
  std::vector<Fd> liveness_sockets;         // for Liveness; none for our own
};

// Meets the other ranks at the job's store and connects the liveness sockets. When it returns, on any rank, rank 0 has
// let the store go and no rank uses it any more, so that a script may use the same port as if we had not.
// Throws base::TimeoutError that names the ranks which did not join; base::ConfigError, on all ranks, when versions,
// configurations or numbers of ranks differ, naming two ranks and the difference, and in a process whose rank another
// one has already.
Joined join(const JoinOptions& options);

}  // namespace lamina::transport
