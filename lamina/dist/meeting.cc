// SPDX-License-Identifier: Apache-2.0
#include "lamina/dist/meeting.h"

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "lamina/base/error.h"
#include "lamina/base/str.h"
#include "lamina/transport/roll_call.h"

namespace lamina::dist {
Meeting::Meeting(const base::World& world, const std::string& name, std::chrono::milliseconds timeout,
                 const std::function<void()>& check_interrupt)
    : deadline_(base::Deadline::after(timeout)),
      store_({world.master_addr, world.master_port, transport::hosts_store(world.rank), deadline_, check_interrupt}) {
  const int own = static_cast<int>(world.rank.value);
  transport::RollCall ranks(store_, {name + "/", world.rank, world.size, timeout, deadline_});
  if (store_.c10d()->add(base::str(name, "/processes/", own), 1) > 1) {
    throw base::ConfigError(base::str("two processes call themselves rank ", own, ": check RANK"));
  }
  const auto sizes = ranks.call(std::to_string(world.size));
  ranks.leave();
  for (std::size_t rank = 0; rank < sizes.size(); ++rank) {
    if (sizes[rank] == sizes[0]) continue;
    throw base::ConfigError(base::str("ranks 0 and ", rank, " differ in their WORLD_SIZE: ", sizes[0], " and ",
                                      sizes[rank], ": start them alike"));
  }
}

}  // namespace lamina::dist
