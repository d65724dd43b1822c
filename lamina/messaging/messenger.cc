// SPDX-License-Identifier: Apache-2.0
#include "lamina/messaging/messenger.h"

#include <array>
#include <chrono>
#include <utility>

#include "lamina/base/str.h"
#include "lamina/faces/sayings.h"
#include "lamina/messaging/recording_transport.h"
#include "lamina/messaging/relay.h"

namespace lamina::messaging {

Messenger::Messenger(std::unique_ptr<transport::Transport> transport, observe::Recorder& recorder)
    : transport_(std::make_unique<RecordingTransport>(std::move(transport), recorder)),
      mailbox_(*transport_, handlers_),
      presence_(mailbox_) {
  const auto rumours = std::make_shared<Rumours>(mailbox_, *transport_);
  handlers_.on(kFailedRank, [this, rumours](transport::Message&& told) {
    if (!rumours->hear(told)) return;
    lose(told.call.origin, told.fields);
    rumours->pass_on();
  });
  // Others are neighbours now.
  watch({[](base::Rank) { return std::string(); }, [rumours](const base::Loss&) { rumours->pass_on(); }});
  handlers_.on(kRelayed, [this](transport::Message&& word) {
    if (!send_on(mailbox_, *transport_, word)) handlers_.receive(arrived(std::move(word)));
  });
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

}  // namespace lamina::messaging
