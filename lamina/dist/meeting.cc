// SPDX-License-Identifier: Apache-2.0
#include "lamina/dist/meeting.h"

#include "lamina/environment/progress.h"
#include "lamina/rendezvous/roll_call.h"

namespace lamina::dist {

Meeting::Meeting(const environment::World& world, const std::string& name, std::chrono::milliseconds timeout,
                 const std::function<void()>& check_interrupt)
    : deadline_(base::Deadline::after(timeout)),
      store_({world.master_addr, world.master_port, rendezvous::hosts_store(world.rank), deadline_, check_interrupt}) {
  if (world.local_size < world.size) environment::ProgressReporter().patience(timeout);
  rendezvous::RollCall ranks(store_, {name + "/", world.rank, world.size, timeout, deadline_});
  ranks.meet();
  ranks.call("");
  ranks.leave();
}

}  // namespace lamina::dist
