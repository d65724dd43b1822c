// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "lamina/transport/local_puts.h"
#include "lamina/transport/transport.h"

namespace lamina::transport {

// The transport of a world of one rank: what it sends, to itself, is delivered in the sender's thread.
class Loopback : public Transport {
 public:
  base::Rank rank() const override { return base::Rank(0); }
  int size() const override { return 1; }
  void start(Events events) override { events_ = std::move(events); }
  void send(base::Rank to, const Message& message) override;
  void send_packed(base::Rank to, Frame frame, base::Step about) override;
  std::unique_ptr<Transfer> post(base::Rank from, Parcel parcel) override {
    return puts_.post(rank(), from, std::move(parcel));
  }
  std::unique_ptr<Transfer> put(base::Rank to, Parcel parcel) override {
    return puts_.put(rank(), to, std::move(parcel));
  }
  void close(bool) override {}

 private:
  Events events_;
  LocalPuts puts_;
};

}  // namespace lamina::transport
