// SPDX-License-Identifier: Apache-2.0
#include "lamina/messaging/handlers.h"

#include <algorithm>

#include "lamina/base/error.h"
#include "lamina/base/str.h"

namespace lamina::messaging {

void Handlers::on(transport::Kind kind, Handler handler) {
  if (find(kind) != nullptr) throw base::InternalError(base::str("two handlers of messages \"", kind.words(), "\""));
  handlers_.emplace_back(kind, std::move(handler));
}

void Handlers::receive(transport::Message&& message) const {
  const auto* handler = find(message.kind);
  if (handler == nullptr) {
    throw base::FormatError(base::str("nobody here handles messages \"", message.kind.words(), "\""));
  }
  (*handler)(std::move(message));
}

const Handlers::Handler* Handlers::find(transport::Kind kind) const {
  const auto found = std::ranges::find(handlers_, kind, [](const auto& entry) { return entry.first; });
  return found == handlers_.end() ? nullptr : &found->second;
}

}  // namespace lamina::messaging
