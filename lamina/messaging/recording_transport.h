// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "lamina/observe/recorder.h"
#include "lamina/transport/transport.h"

namespace lamina::messaging {

// Another transport, whose messages of steps are recorded when they leave and when they arrive.
class RecordingTransport : public transport::Transport {
 public:
  RecordingTransport(std::unique_ptr<transport::Transport> inner, observe::Recorder& recorder)
      : inner_(std::move(inner)), recorder_(recorder) {}

  base::Rank rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }
  void start(Events events) override;
  void look_out() override { inner_->look_out(); }
  void send(base::Rank to, const transport::Message& message) override;
  void tell(base::Rank to, const transport::Message& message) override;
  void give_up_sends(std::optional<base::Step> step) override { inner_->give_up_sends(step); }
  std::unique_ptr<transport::Transfer> post(base::Rank from, transport::Parcel parcel) override {
    return inner_->post(from, std::move(parcel));
  }
  std::unique_ptr<transport::Transfer> put(base::Rank to, transport::Parcel parcel) override {
    return inner_->put(to, std::move(parcel));
  }
  void close(bool orderly) override { inner_->close(orderly); }
  void tell_interrupted() override { inner_->tell_interrupted(); }

 private:
  const std::unique_ptr<transport::Transport> inner_;
  observe::Recorder& recorder_;
};

}  // namespace lamina::messaging
