// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "lamina/collective/lane.h"
#include "lamina/shared_memory/communicator.h"

namespace lamina::collective {

// The collectives of a group over shared memory, for torch. Those of all members run one after the other, in the order
// in which they are called; sends and receives beside them, in the order of the calls with each other member. All throw
// base::UsageError, before anything is started, for tensors that do not fit.
c10::intrusive_ptr<c10d::Backend> make_shared_memory_backend(shared_memory::Neighbours neighbours,
                                                             std::chrono::milliseconds timeout,
                                                             std::function<void()> check_interrupt);

}  // namespace lamina::collective
