// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "lamina/observe/recorder.h"
#include "lamina/transport/forwarding.h"

namespace lamina::messaging {

// Another transport, whose messages of steps are recorded when they leave and when they arrive.
class RecordingTransport : public transport::ForwardingTransport {
 public:
  RecordingTransport(std::unique_ptr<transport::Transport> inner, observe::Recorder& recorder)
      : ForwardingTransport(std::move(inner)), recorder_(recorder) {}

  void start(Events events) override;
  void send(base::Rank to, const transport::Message& message) override;
  void tell(base::Rank to, const transport::Message& message) override;

 private:
  observe::Recorder& recorder_;
};

}  // namespace lamina::messaging
