// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <utility>

#include "lamina/transport/transport.h"

namespace lamina::transport {

// Another transport, for a class that adds something to some of its calls.
class ForwardingTransport : public Transport {
 public:
  explicit ForwardingTransport(std::unique_ptr<Transport> inner) : inner_(std::move(inner)) {}

  base::Rank rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }
  void start(Events events) override { inner_->start(std::move(events)); }
  void send(base::Rank to, const Message& message) override { inner_->send(to, message); }
  void tell(base::Rank to, const Message& message) override { inner_->tell(to, message); }
  void send_packed(base::Rank to, Frame frame, base::Step about) override {
    inner_->send_packed(to, std::move(frame), about);
  }
  void give_up_sends(std::optional<base::Step> step) override { inner_->give_up_sends(step); }
  std::unique_ptr<Transfer> post(base::Rank from, Parcel parcel) override {
    return inner_->post(from, std::move(parcel));
  }
  std::unique_ptr<Transfer> put(base::Rank to, Parcel parcel) override { return inner_->put(to, std::move(parcel)); }
  void look_out() override { inner_->look_out(); }
  void tell_interrupted() override { inner_->tell_interrupted(); }
  void close(bool orderly) override { inner_->close(orderly); }

 protected:
  Transport& inner() const { return *inner_; }

 private:
  const std::unique_ptr<Transport> inner_;
};

}  // namespace lamina::transport
