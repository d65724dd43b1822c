// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lamina/base/error.h"
#include "lamina/messaging/handlers.h"
#include "lamina/messaging/mailbox.h"
#include "lamina/messaging/presence.h"
#include "lamina/observe/recorder.h"
#include "lamina/transport/transport.h"

namespace lamina::messaging {

// One rank's end of all that goes between the ranks of a job: the transport, those who handle each kind of message, the
// mailbox, and what is known of ranks that were lost. Each subsystem says what it handles and watches for before
// start(), and is gone only after close().
class Messenger {
 public:
  // A subsystem, as the loss of a rank concerns it. Called on the transport's thread.
  struct Watcher {
    // The clauses that the error shall have besides: each begins with a comma or a semicolon.
    std::function<std::string(base::Rank)> known;
    std::function<void(const base::Loss&)> lost;  // after the mailbox has heard of it
  };

  // Messages of steps are recorded while `recorder` is on.
  Messenger(std::unique_ptr<transport::Transport> transport, observe::Recorder& recorder);

  base::Rank rank() const { return transport_->rank(); }
  transport::Transport& transport() { return *transport_; }
  Handlers& handlers() { return handlers_; }
  Mailbox& mailbox() { return mailbox_; }
  Presence& presence() { return presence_; }

  void watch(Watcher watcher) { watchers_.push_back(std::move(watcher)); }

  // Begins delivery; called once.
  void start();
  // Ends it: see Transport::close. Idempotent.
  void close(bool orderly) { transport_->close(orderly); }

 private:
  void lose(base::Rank lost, const std::string& why);

  const std::unique_ptr<transport::Transport> transport_;
  Handlers handlers_;
  Mailbox mailbox_;
  Presence presence_;
  std::vector<Watcher> watchers_;
  std::optional<base::Rank> first_lost_;  // touched by the transport's thread alone
};

}  // namespace lamina::messaging
