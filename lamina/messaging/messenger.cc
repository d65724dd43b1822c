// SPDX-License-Identifier: Apache-2.0
#include "lamina/messaging/messenger.h"

#include <array>
#include <chrono>
#include <utility>

#include "lamina/base/str.h"
#include "lamina/faces/sayings.h"
#include "lamina/messaging/failed_rank.h"
#include "lamina/messaging/recording_transport.h"

namespace lamina::messaging {

Messenger::Messenger(std::unique_ptr<transport::Transport> transport, observe::Recorder& recorder)
    : transport_(std::make_unique<RecordingTransport>(std::move(transport), recorder)),
      mailbox_(*transport_, handlers_),
      presence_(mailbox_) {
  handlers_.on(kFailedRank, [this](transport::Message&& told) { lose(told.call.origin, told.fields); });
}

void Messenger::start() {
  transport_->start({[this](transport::Message message) { handlers_.receive(std::move(message)); },
                     [this](base::Rank rank, const std::string& why) { lose(rank, why); }});
}

void Messenger::lose(base::Rank lost, const std::string& why) {
  if (mailbox_.loss(std::array{lost}, std::chrono::milliseconds(0))) return;  // it had said so, and now has ended
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

void tell_failed(transport::Transport& transport, const std::string& why) {
  transport::Message message;
  message.kind = kFailedRank;
  message.call.origin = transport.rank();
  message.fields = why;
  for (int rank = 0; rank < transport.size(); ++rank) {
    try {
      transport.tell(base::Rank(rank), message);
    } catch (const base::Error&) {  // of a rank that is lost itself, or takes nothing any more
    }
  }
}

}  // namespace lamina::messaging
