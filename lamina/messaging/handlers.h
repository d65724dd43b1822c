// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <utility>
#include <vector>

#include "lamina/transport/message.h"

namespace lamina::messaging {

// [Note: kinds] The class that handles messages of a kind names that kind in its own header, and says here, as it is
// made, that it handles them. So a new subsystem adds messages without a change to the transport or to anybody else. A
// kind is a word that travels, so no two subsystems need to agree on numbers, and a rank can name what it does not
// know. Ranks of one job run the same code: what one of them sends the others handle.
class Handlers {
 public:
  // Called on the transport's thread: see Transport::Events. Throws base::FormatError for a message that is malformed.
  using Handler = std::function<void(transport::Message&&)>;

  // Before the transport starts. Throws base::UsageError when another one handles that kind.
  void on(transport::Kind kind, Handler handler);

  // Hands a message to the one that handles it. Throws base::FormatError when nobody does.
  void receive(transport::Message&& message) const;

 private:
  const Handler* find(transport::Kind kind) const;

  std::vector<std::pair<transport::Kind, Handler>> handlers_;
};

}  // namespace lamina::messaging
