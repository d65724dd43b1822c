// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "lamina/collective/lane.h"
#include "lamina/shared_memory/communicator.h"

namespace lamina::collective {

// A backend whose collectives a member may leave, though the others have begun them.
class Leavable {
 public:
  virtual ~Leavable() = default;
  // How many this member has begun, of which none are under way.
  virtual std::uint64_t begun() = 0;
  // Gives up all of this member's that have not ended. Returns begun().
  virtual std::uint64_t abandon() = 0;
  // Goes on with that number, the largest of the members', in all of which none is under way.
  virtual void resume_at(std::uint64_t number) = 0;
};

// A backend that compares what collectives are for.
class Purposeful {
 public:
  virtual ~Purposeful() = default;
  // The collective that is begun next is for this, on all members.
  virtual void set_purpose(std::string purpose) = 0;
};

// A backend whose members can have memory in common.
class MemorySharing {
 public:
  virtual ~MemorySharing() = default;
  // Collective: a segment of each member. Throws what shared_memory::Neighbours::share() throws.
  virtual std::vector<shared_memory::Segment> share(std::size_t bytes, base::Deadline deadline) = 0;
};

// The collectives of a group over shared memory, for torch. Collectives run one after the other, in the order in which
// they are called. Sends and receives run beside them, in the order of the calls with each other member. All throw
// base::UsageError, before anything is started, for tensors that do not fit. It is Leavable and Purposeful, and has
// MemorySharing. Its allocateTensor() gives tensors that the other members read where they lie; any thread may call it,
// and one member alone; they outlive the group, which keeps what was freed for the next.
c10::intrusive_ptr<c10d::Backend> make_shared_memory_backend(shared_memory::Neighbours neighbours,
                                                             std::chrono::milliseconds timeout,
                                                             std::function<void()> check_interrupt);

}  // namespace lamina::collective
