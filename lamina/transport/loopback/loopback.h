// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "lamina/transport/transport.h"

namespace lamina::transport {

// The transport of a world of one rank: what it sends, to itself, is delivered in the sender's thread.
class Loopback : public Transport {
 public:
  base::Rank rank() const override { return base::Rank(0); }
  int size() const override { return 1; }
  void start(Events events) override { events_ = std::move(events); }
  void send(base::Rank to, const Message& message) override;
  void close(bool) override {}

 private:
  Events events_;
};

}  // namespace lamina::transport
