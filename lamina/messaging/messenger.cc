// SPDX-License-Identifier: Apache-2.0
#include "lamina/messaging/messenger.h"

#include <utility>

#include "lamina/base/str.h"
#include "lamina/faces/sayings.h"
#include "lamina/messaging/recording_transport.h"

namespace lamina::messaging {

Messenger::Messenger(std::unique_ptr<transport::Transport> transport, observe::Recorder& recorder)
    : transport_(std::make_unique<RecordingTransport>(std::move(transport), recorder)),
      mailbox_(*transport_, handlers_),
      presence_(mailbox_) {}

void Messenger::start() {
  transport_->start({[this](transport::Message message) { handlers_.receive(std::move(message)); },
                     [this](base::Rank rank, const std::string& why) { lose(rank, why); }});
}

void Messenger::lose(base::Rank lost, const std::string& why) {
  std::string known;
  for (const auto& watcher : watchers_) known += watcher.known(lost);
  // Which may be the cause of this loss.
  if (first_lost_) known += base::str("; rank ", *first_lost_, " was lost before");
  if (!first_lost_) first_lost_ = lost;
  const auto left = mailbox_.waits().left(lost);
  if (!left.empty()) {
    known += base::str("; all ranks make the same calls of lamina, and as many: ", faces::said("as-many-calls"));
  }
  const base::Loss loss{lost, left.empty() ? why : base::str("it ", left), known};
  mailbox_.lose(loss);
  for (const auto& watcher : watchers_) watcher.lost(loss);
}

}  // namespace lamina::messaging
