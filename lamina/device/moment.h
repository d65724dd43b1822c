// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <optional>

namespace c10 {
struct Event;
}

namespace lamina::devices {

// A moment in what this thread computes, on the steady clock: on the host now; on a device when it comes to what this
// thread enqueues next. That is known later, and nobody waits for it. Of a device that has failed it is the host's.
//
// [Note: clock of a device] Events tell how much later one passed than another, and no time of day. A device does
// nothing before it is told to: so each event passes no earlier than the host has recorded it. The one that passed
// soonest after that says how far the two clocks are apart. From time to time a later event takes the place of the one
// from which the others count, since these differences have few digits.
class Moment {
 public:
  Moment() noexcept;

  bool is_of_host() const { return passed_ == nullptr; }
  // Nanoseconds of the steady clock; none before the device has come there.
  std::optional<std::int64_t> ns() const noexcept;

 private:
  std::int64_t recorded_ns_;
  std::shared_ptr<c10::Event> passed_;
};

}  // namespace lamina::devices
