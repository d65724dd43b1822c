// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <functional>
#include <string>

#include "lamina/environment/world.h"
#include "lamina/rendezvous/job_store.h"

namespace lamina::dist {

// All ranks of a launched world, met at the job's store; rank 0 hosts it, where no agent does, while this lives. It
// comes before a backend's own meeting, which cannot tell the ranks that are missing.
class Meeting {
 public:
  // `name` is the same on all ranks and new for each meeting. Throws base::TimeoutError, which names those that did not
  // come; base::ConfigError when two processes have one rank, or ranks know of different numbers of ranks.
  Meeting(const environment::World& world, const std::string& name, std::chrono::milliseconds timeout,
          const std::function<void()>& check_interrupt);

  rendezvous::JobStore& store() { return store_; }

 private:
  const base::Deadline deadline_;
  rendezvous::JobStore store_;
};

}  // namespace lamina::dist
