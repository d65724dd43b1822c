// SPDX-License-Identifier: Apache-2.0
#include "lamina/device/moment.h"

#include <c10/core/Event.h>

#include <algorithm>
#include <chrono>
#include <mutex>

#include "lamina/device/streams.h"

namespace lamina::devices {
namespace {

constexpr double kNsPerMs = 1e6;
constexpr double kCountsAnewMs = 1000;

std::int64_t now_ns() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
}

// The event from which those of the device count, and when that passed, as far as is known.
struct DeviceClock {
  std::mutex mutex;  // of the rest, and of events that are read
  std::shared_ptr<c10::Event> first;
  std::int64_t first_ns = 0;
};

DeviceClock& clock() {
  static auto& made = *new DeviceClock;  // an event is not destroyed after its device
  return made;
}

}  // namespace

Moment::Moment() noexcept : recorded_ns_(now_ns()) {
  try {
    const auto stream = current_stream();
    if (!stream) return;
    auto event = std::make_shared<c10::Event>(stream->device_type(), c10::EventFlag::BACKEND_DEFAULT);  // timed
    event->record(*stream);
    passed_ = std::move(event);
  } catch (const c10::Error&) {
    return;
  }
  const std::lock_guard lock(clock().mutex);
  if (clock().first != nullptr && clock().first->device() == passed_->device()) return;
  clock().first = passed_;
  clock().first_ns = recorded_ns_;
}

std::optional<std::int64_t> Moment::ns() const noexcept {
  if (passed_ == nullptr) return recorded_ns_;
  auto& of_device = clock();
  const std::lock_guard lock(of_device.mutex);
  try {
    if (!passed_->query() || !of_device.first->query()) return std::nullopt;
    if (of_device.first->device() != passed_->device()) return recorded_ns_;  // the rank has another one since
    const double later_ms = of_device.first->elapsedTime(*passed_);
    const auto later_ns = static_cast<std::int64_t>(later_ms * kNsPerMs);
    of_device.first_ns = std::max(of_device.first_ns, recorded_ns_ - later_ns);
    const auto passed_ns = std::min(of_device.first_ns + later_ns, now_ns());
    if (later_ms > kCountsAnewMs) {
      of_device.first = passed_;
      of_device.first_ns = passed_ns;
    }
    return passed_ns;
  } catch (const c10::Error&) {
    return recorded_ns_;
  }
}

}  // namespace lamina::devices
