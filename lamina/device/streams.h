// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/core/Stream.h>

#include <memory>
#include <optional>

// [Note: one stream] A rank computes on one stream of its device: that of the thread that entered the step. Device and
// stream are each thread's own, and no ThreadLocalState carries them. So every thread that computes for a rank, or
// touches tensors of its device, begins with a c10::OptionalStreamGuard of that stream.
namespace lamina::devices {

// The stream of the rank's device that this thread is on; none where the rank's device is the host.
std::optional<c10::Stream> current_stream();

// The stream of the rank's device that threads are on which chose none.
std::optional<c10::Stream> default_stream();

// A place in the stream of this thread, behind all that it has enqueued so far; passed at once where there is no
// stream.
class Mark {
 public:
  Mark();
  ~Mark();
  Mark(Mark&&) noexcept;

  bool passed() const;  // throws what the device has failed with

 private:
  struct Event;
  std::unique_ptr<Event> event_;
};

}  // namespace lamina::devices
