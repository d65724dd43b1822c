// SPDX-License-Identifier: Apache-2.0
#include "lamina/messaging/recording_transport.h"

#include <ATen/core/Tensor.h>

#include "lamina/base/hash.h"

namespace lamina::messaging {
namespace {

using observe::Event;
using observe::What;
using transport::Message;

std::uint64_t hash_of(const base::CallId& call, std::uint64_t hash) {
  for (const auto part : {call.origin.value, call.step.value, call.microbatch.value, call.counter}) {
    hash = base::hash64(part, hash);
  }
  return hash;
}

// One number where it leaves and where it arrives, and another one for every other message of the job.
std::uint64_t name_of(const Message& message, base::Rank to) {
  const auto hash = base::hash64(to.value, base::hash64(message.kind.words()));
  return base::hash64(message.fields, hash_of(message.call, hash));
}

std::int64_t bytes_of(const Message& message) {
  std::int64_t bytes = 0;
  value::for_each_tensor(message.body, [&](const at::Tensor& tensor) {
    if (tensor.defined()) bytes += static_cast<std::int64_t>(tensor.nbytes());
  });
  return bytes;
}

Event event_of(What what, const Message& message, base::Rank to) {
  return {.what = what,
          .step = message.call.step.value,
          .microbatch = message.call.microbatch.value,
          .name = std::string(message.kind.words()),
          .bytes = bytes_of(message),
          .message = name_of(message, to)};
}

Event sent(const Message& message, base::Rank to) {
  Event event = event_of(What::kSend, message, to);
  event.peer = to.value;
  return event;
}

observe::Recorder* recorder_for(const Message& message, observe::Recorder& recorder) {
  return message.call.step == transport::kNoStep ? nullptr : &recorder;
}

}  // namespace

// Its sender is known when all ranks' events are together: see observe::complete().
void RecordingTransport::start(Events events) {
  auto message = [this, deliver = std::move(events.message)](Message message) {
    const observe::Span span(recorder_for(message, recorder_),
                             [&] { return event_of(What::kReceive, message, rank()); });
    deliver(std::move(message));
  };
  ForwardingTransport::start({std::move(message), std::move(events.lost)});
}

void RecordingTransport::send(base::Rank to, const Message& message) {
  const observe::Span span(recorder_for(message, recorder_), [&] { return sent(message, to); });
  ForwardingTransport::send(to, message);
}

void RecordingTransport::tell(base::Rank to, const Message& message) {
  const observe::Span span(recorder_for(message, recorder_), [&] { return sent(message, to); });
  ForwardingTransport::tell(to, message);
}

}  // namespace lamina::messaging
