// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "lamina/collective/nccl_communicator.h"

namespace lamina::collective {

// The collectives of a group on tensors of the rank's device, over NCCL. They run one after the other on a stream of
// their own: after what the stream of the caller has then, and before what the stream has that waits for them. The host
// waits for nothing; a future ends when its collective is enqueued. abort() ends what waits for a lost member.
//
// `staged`, a backend of the same group through the host, has what NCCL has not: reductions by bits and of other types,
// barriers, and sends and receives one by one. NCCL would match these in one order with all else, so two members that
// first send and then receive would wait for each other.
c10::intrusive_ptr<c10d::Backend> make_nccl_backend(std::shared_ptr<nccl::Communicator> communicator,
                                                    const nccl::Library& library,
                                                    c10::intrusive_ptr<c10d::Backend> staged);

}  // namespace lamina::collective
