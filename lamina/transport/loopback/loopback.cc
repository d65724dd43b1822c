// SPDX-License-Identifier: Apache-2.0
#include "lamina/transport/loopback/loopback.h"

#include "lamina/base/error.h"
#include "lamina/base/str.h"

namespace lamina::transport {

void Loopback::send(base::Rank to, const Message& message) { send_packed(to, pack(message), message.call.step); }

void Loopback::send_packed(base::Rank to, Frame frame, base::Step /*about*/) {
  if (to != rank()) throw base::InternalError(base::str("a message to rank ", to, " in a world of one"));
  for (auto& buffer : frame.buffers) buffer = buffer.clone();
  events_.message(unpack(frame.head, std::move(frame.buffers)));
}

}  // namespace lamina::transport
