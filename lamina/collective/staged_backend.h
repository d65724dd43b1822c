// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace lamina::collective {

// The collectives of a group on tensors of the rank's device, through the host: see [Note: staging]. What a collective
// reads is copied out when it is called, on a stream of its own. In a thread `inner`, a backend of the host that nobody
// else has, does it when the copies have passed; and whoever waits for it has its own stream copy results in. So no
// thread waits for the device, but where it waits for the other members. Collectives run in the order of their calls;
// sends and receives beside them, in the order of the calls with each other member.
c10::intrusive_ptr<c10d::Backend> make_staged_backend(c10::intrusive_ptr<c10d::Backend> inner,
                                                      std::chrono::milliseconds timeout);

}  // namespace lamina::collective
