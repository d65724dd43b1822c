// SPDX-License-Identifier: Apache-2.0
#include "lamina/transport/ucx/sending.h"

#include "lamina/base/error.h"
#include "lamina/base/str.h"
#include "lamina/device/capabilities.h"

namespace lamina::transport::ucx {

Sending::Sending(Frame from, bool offers, std::condition_variable& to_tell, base::Step about)
    : frame(std::move(from)), step(about.value), changed(to_tell) {
  header.head_size = frame.head.size();
  PacketPlan plan;
  std::string inside, lent;
  for (std::uint32_t i = 0; i < frame.buffers.size(); ++i) {
    const at::Tensor& buffer = frame.buffers[i];
    const bool is_lent = !devices::is_host(buffer);
    if (plan.takes(buffer.numel())) {
      base::internal_check(!is_lent, "a small buffer of a message that is not on the host");
      inside.append(static_cast<const char*>(buffer.const_data_ptr()), static_cast<std::size_t>(buffer.numel()));
    } else if (is_lent) {
      alone.push_back(i);
      lent.append(reinterpret_cast<const char*>(&i), sizeof i);
      ++header.lent;
    } else if (offers) {
      const auto address = reinterpret_cast<std::uint64_t>(buffer.const_data_ptr());
      frame.head.append(reinterpret_cast<const char*>(&address), sizeof address);
      ++header.offers;
    } else {
      alone.push_back(i);
    }
  }
  frame.head += lent;
  header.digest = contact::digest(frame.head);
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
