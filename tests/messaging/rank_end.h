// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "lamina/messaging/messenger.h"

namespace lamina::messaging {

// One rank's end of all that goes between ranks, with a recorder of its own. Whoever starts the messenger closes it.
struct RankEnd {
  explicit RankEnd(std::unique_ptr<transport::Transport> transport) : messenger(std::move(transport), recorder) {}

  observe::Recorder recorder;
  Messenger messenger;
};

}  // namespace lamina::messaging
