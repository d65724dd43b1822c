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
  std::uint64_t head_size = 0;       // how much of the packet is the head
  std::size_t plain_size = 0;        // the packet without addresses
  std::vector<std::uint32_t> alone;  // indices of the buffers that travel on their own
  std::vector<PieceHeader> headers;  // UCX reads them until the piece is sent
  int pending = 0;
  ucs_status_t status = UCS_OK;
  std::condition_variable& changed;  // told when it has ended

  Sending(Frame from, std::condition_variable& to_tell);
  void piece_done(ucs_status_t with);
};

}  // namespace lamina::transport::ucx
