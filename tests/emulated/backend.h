// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace emulated {

// [Note: collectives] A backend of c10d over Gloo that behaves as NCCL's. A collective runs in a stream of its own,
// after what the current stream has at the call. Its Work::wait() makes the current stream wait, not the host; its
// future ends when it is enqueued. A member that is absent, or lost, leaves the stream spinning until abort() or
// shutdown(). Gloo sees copies of the tensors, so that what comes after an abort goes nowhere.
c10::intrusive_ptr<c10d::Backend> make_backend(const c10::intrusive_ptr<c10d::Backend>& gloo);

}  // namespace emulated
