// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <thread>

#include "lamina/device/copies.h"
#include "lamina/transport/forwarding.h"
#include "lamina/transport/lender.h"

namespace lamina::transport {

// Another transport, which carries tensors of the rank's device through the host ([Note: staging]), but for buffers
// that it takes as they are (Lender). send() of a message that has some returns when its copy is enqueued; a thread for
// each receiver sends what has been copied, in order. So a later failure is no error of send(): a lost rank is told as
// any, and of a live one that takes nothing, a line.
class StagingTransport : public ForwardingTransport {
 public:
  explicit StagingTransport(std::unique_ptr<Transport> inner)
      : ForwardingTransport(std::move(inner)), lender_(dynamic_cast<Lender*>(&this->inner())) {}
  ~StagingTransport() override;

  // Throws what the inner one throws where nothing has to be copied or waited for, and base::PeerError.
  void send(base::Rank to, const Message& message) override;
  void tell(base::Rank to, const Message& message) override;
  void give_up_sends(std::optional<base::Step> step) override;
  void close(bool orderly) override;

 private:
  // A message whose buffers are on their way to the host, or are to be ready, or one that follows such.
  struct Staged {
    Frame frame;
    std::vector<devices::CopyOut> copies;
    std::vector<devices::LentBytes> lent;
    base::Step step = kNoStep;
    std::int64_t bytes = 0;
    std::optional<Message> words = std::nullopt;  // in the frame's place, of one that is told
  };
  // Messages to one rank.
  struct Outbox {
    std::deque<Staged> staged;
    bool sending = false;  // one that has left `staged`
    std::thread thread;
  };

  Staged stage(base::Rank to, const Message& message);
  bool has_staged(base::Rank to);
  void add(base::Rank to, Staged staged);
  void send_until_closed(base::Rank to, Outbox& outbox);
  void send_staged(base::Rank to, Staged staged);
  bool await_copies(const Staged& staged);

  Lender* const lender_;  // the inner transport, where it is one
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<base::Rank, Outbox> outboxes_;
  std::int64_t staged_bytes_ = 0;
  std::atomic<bool> closing_ = false;  // changed under the mutex
};

}  // namespace lamina::transport
