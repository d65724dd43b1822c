// SPDX-License-Identifier: Apache-2.0
#include "lamina/dist/meeting.h"

#include "lamina/transport/roll_call.h"

namespace lamina::dist {

Meeting::Meeting(const base::World& world, const std::string& name, std::chrono::milliseconds timeout,
                 const std::function<void()>& check_interrupt)
    : deadline_(base::Deadline::after(timeout)),
      store_({world.master_addr, world.master_port, transport::hosts_store(world.rank), deadline_, check_interrupt}) {
  transport::RollCall ranks(store_, {name + "/", world.rank, world.size, timeout, deadline_});
  ranks.meet();
  ranks.call("");
  ranks.leave();
}

}  // namespace lamina::dist
