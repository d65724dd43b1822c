// SPDX-License-Identifier: Apache-2.0
#include "lamina/rendezvous/master_address.h"

#include <algorithm>

#include "lamina/base/log.h"
#include "lamina/base/str.h"
#include "lamina/rendezvous/socket.h"

namespace lamina::rendezvous {

environment::World meeting_outside(environment::World world) {
  if (!world.launched || world.local_size >= world.size || world.master_addr == "localhost") return world;
  const auto named = Address::resolve(world.master_addr, world.master_port);
  const bool numeric = std::ranges::any_of(named, [&](const auto& each) { return each.host() == world.master_addr; });
  if (numeric || !std::ranges::all_of(named, &Address::loopback)) return world;
  const auto outward = Address::outward();
  if (!outward) return world;
  if (world.rank == base::Rank(0)) {
    base::log_warning(base::str("MASTER_ADDR is \"", world.master_addr, "\", which is ", named.front().host(),
                                " on its own machine, where no other machine comes: this one listens at ",
                                outward->host()));
  }
  world.master_addr = outward->host();
  return world;
}

}  // namespace lamina::rendezvous
