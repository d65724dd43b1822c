// SPDX-License-Identifier: Apache-2.0
#include "lamina/transport/ucx/sending.h"

#include "lamina/base/error.h"
#include "lamina/base/str.h"

namespace lamina::transport::ucx {

Sending::Sending(Frame from, std::condition_variable& to_tell)
    : frame(std::move(from)), head_size(frame.head.size()), changed(to_tell) {
  PacketPlan plan;
  for (std::uint32_t i = 0; i < frame.buffers.size(); ++i) {
    const at::Tensor& buffer = frame.buffers[i];
    if (!buffer.device().is_cpu()) {
      throw base::UsageError(base::str("tensors on ", buffer.device(), " cannot be sent to another rank yet"));
    }
    if (plan.takes(buffer.device(), buffer.numel())) {
      frame.head.append(static_cast<const char*>(buffer.const_data_ptr()), static_cast<std::size_t>(buffer.numel()));
    } else {
      alone.push_back(i);
    }
  }
  headers.resize(alone.size() + 1);
  plain_size = frame.head.size();
  for (const std::uint32_t i : alone) {
    const auto address = reinterpret_cast<std::uint64_t>(frame.buffers[i].const_data_ptr());
    frame.head.append(reinterpret_cast<const char*>(&address), sizeof address);
  }
}

void Sending::piece_done(ucs_status_t with) {
  if (with != UCS_OK) status = with;
  if (--pending == 0) changed.notify_all();
}

}  // namespace lamina::transport::ucx
