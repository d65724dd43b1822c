// SPDX-License-Identifier: Apache-2.0
#include "lamina/transport/ucx/sending.h"

#include "lamina/base/error.h"
#include "lamina/base/str.h"

namespace lamina::transport::ucx {

Sending::Sending(Frame from, bool offers, std::condition_variable& to_tell, base::Step about)
    : frame(std::move(from)), step(about.value), changed(to_tell) {
  header.head_size = frame.head.size();
  PacketPlan plan;
  std::string inside;
  for (std::uint32_t i = 0; i < frame.buffers.size(); ++i) {
    const at::Tensor& buffer = frame.buffers[i];
    if (!buffer.device().is_cpu()) {
      throw base::UsageError(base::str("tensors on ", buffer.device(), " cannot be sent to another rank yet"),
                             base::Code{"step-cannot-travel"});
    }
    if (plan.takes(buffer.device(), buffer.numel())) {
      inside.append(static_cast<const char*>(buffer.const_data_ptr()), static_cast<std::size_t>(buffer.numel()));
      continue;
    }
    alone.push_back(i);
    const auto address = reinterpret_cast<std::uint64_t>(buffer.const_data_ptr());
    if (offers) frame.head.append(reinterpret_cast<const char*>(&address), sizeof address);
  }
  if (offers) header.offers = static_cast<std::uint32_t>(alone.size());
  header.digest = rendezvous::digest(frame.head);
  frame.head += inside;
  headers.resize(alone.size() + 1);
}

void Sending::piece_done(ucs_status_t with) {
  if (with != UCS_OK) status = with;
  if (--pending > 0) return;
  if (unawaited) {
    delete this;
  } else {
    changed.notify_all();
  }
}

}  // namespace lamina::transport::ucx
