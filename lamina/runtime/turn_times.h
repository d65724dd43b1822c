// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <utility>

#include "lamina/device/moment.h"
#include "lamina/observe/recorder.h"

namespace lamina::runtime {

// [Note: times of turns] On the host a turn is as long as its thread computes. A device runs later what the turn has
// enqueued: there it lasts from when the device comes to the first of it until it has done the last. That is known
// later. So turns and steps of a device wait here until they have passed, and go to their recorder in the order in
// which they ended. Nobody waits for them, but who ends a recording.

// Records what began and ended at these moments; at once where they are known.
void record(observe::Recorder& recorder, observe::Event event, const devices::Moment& begin,
            const devices::Moment& end);
// Records what has passed by now.
void record_passed();
// The recorder ends: what has not passed is dropped.
void forget_turns(const observe::Recorder& recorder);

// Records the bytes that this rank's tensors have on its device; where that is the host, those that the process has.
void record_memory(observe::Recorder& recorder);

// Records an event that lasts as long as what is computed in the life of this object; nothing where it is off.
class TurnSpan {
 public:
  template <class MakeEvent>
  TurnSpan(observe::Recorder& recorder, const MakeEvent& event) {
    if (!recorder.on()) return;
    recorder_ = &recorder;
    event_ = event();
    began_.emplace();
  }
  ~TurnSpan() {
    if (recorder_ != nullptr) record(*recorder_, std::move(event_), *began_, devices::Moment());
  }
  TurnSpan(const TurnSpan&) = delete;

 private:
  observe::Recorder* recorder_ = nullptr;
  observe::Event event_;
  std::optional<devices::Moment> began_;
};

}  // namespace lamina::runtime
