// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ucp/api/ucp.h>

#include <condition_variable>
#include <vector>

#include "lamina/transport/ucx/wire.h"

namespace lamina::transport::ucx {

// A message on its way out. One that is given up is never freed: UCX may still read it.
struct Sending {
  Frame frame;                       // the head is the packet
  PieceHeader header;                // the packet's, but for what is known when it is posted
  std::vector<std::uint32_t> alone;  // indices of the buffers that travel on their own
  std::vector<PieceHeader> headers;  // UCX reads them until the piece is sent
  int pending = 0;
  bool unawaited = false;  // nobody waits for it: it frees itself
  std::int64_t step;       // that the message is about, or kNoStep's
  ucs_status_t status = UCS_OK;
  std::condition_variable& changed;  // told when it has ended

  // `offers`: the receiver can read our memory. Buffers that are on the device are lent.
  Sending(Frame from, bool offers, std::condition_variable& to_tell, base::Step about = kNoStep);
  void piece_done(ucs_status_t with);
};

}  // namespace lamina::transport::ucx
