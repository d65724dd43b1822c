// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "lamina/base/wait.h"
#include "lamina/messaging/messenger.h"
#include "lamina/parameter_server/context.h"
#include "lamina/parameter_server/protocol.h"

namespace lamina::parameter_server {

// Requests of this rank to others, until their answers. From any thread.
class Requests {
 public:
  explicit Requests(messaging::Messenger& messenger);

  // A request that was sent.
  struct Pending;
  using Asked = std::shared_ptr<Pending>;

  // Sends it, in `context` where there is one; `what` names it in errors. Throws base::PeerError where its owner is
  // lost, and what a message that cannot travel throws.
  Asked ask(base::Rank owner, Request request, std::string what, AutogradContext* context);
  // The answer. Throws the owner's failure as value::RemoteFailure, base::PeerError, base::TimeoutError, what the
  // patience's interrupt throws, and base::CancelledError in a context whose origin is lost. This thread's turn is
  // others' meanwhile.
  value::Value await(const Asked& asked, const base::Patience& patience);

  // The number that request had among those of this rank.
  static std::int64_t number(const Asked& asked);

  void lose(const base::Loss& loss);
  // Ends all waits with base::CancelledError, and any to come.
  void close();

 private:
  void receive(transport::Message&& message);  // kAnswer
  void forget(std::int64_t number);

  messaging::Messenger& messenger_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::int64_t numbers_ = 0;
  std::map<std::int64_t, Asked> pending_;
  std::map<base::Rank, base::Loss> lost_;
  bool closed_ = false;
};

}  // namespace lamina::parameter_server
