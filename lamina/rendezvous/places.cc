// SPDX-License-Identifier: Apache-2.0
#include "lamina/rendezvous/places.h"

#include <algorithm>
#include <cstdint>

#include "lamina/base/str.h"
#include "lamina/rendezvous/job_store.h"
#include "lamina/rendezvous/place.h"
#include "lamina/rendezvous/roll_call.h"

namespace lamina::rendezvous {

environment::World placed_by(environment::World world, const std::vector<std::string>& machines) {
  std::vector<std::string> known;  // in the order of their first ranks
  std::vector<int> ranks;          // on each of them
  for (std::size_t rank = 0; rank < machines.size(); ++rank) {
    const std::string name = machines[rank].empty() ? base::str("rank ", rank) : machines[rank];
    const auto at = static_cast<std::size_t>(std::ranges::find(known, name) - known.begin());
    if (at == known.size()) {
      known.push_back(name);
      ranks.push_back(0);
    }
    if (static_cast<std::int64_t>(rank) == world.rank.value) {
      world.node_rank = static_cast<int>(at);
      world.local_rank = ranks[at];
    }
    ++ranks[at];
  }
  world.local_size = ranks.at(static_cast<std::size_t>(world.node_rank));
  return world;
}

environment::World placed(environment::World world, const std::function<void()>& check_interrupt,
                          std::chrono::milliseconds timeout) {
  if (world.local_size > 0) return world;
  const auto deadline = base::Deadline::after(timeout);
  JobStore store({world.master_addr, world.master_port, hosts_store(world.rank), deadline, check_interrupt});
  RollCall ranks(store, {next_meeting("places"), world.rank, world.size, timeout, deadline});
  ranks.meet();
  const auto places = ranks.call(own_place());
  ranks.leave();
  return placed_by(std::move(world), places);
}

}  // namespace lamina::rendezvous
