// SPDX-License-Identifier: Apache-2.0
#include "lamina/device/streams.h"

#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "lamina/device/capabilities.h"
#include "lamina/device/rank_device.h"

namespace lamina::devices {

std::optional<c10::Stream> current_stream() {
  const auto device = rank_device();
  if (!has_streams(device)) return std::nullopt;
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

std::optional<c10::Stream> default_stream() {
  const auto device = rank_device();
  if (!has_streams(device)) return std::nullopt;
  return c10::impl::VirtualGuardImpl(device.type()).getDefaultStream(device);
}

struct Mark::Event {
  explicit Event(const c10::Stream& stream) : event(stream.device_type()) { event.record(stream); }
  c10::Event event;
};

Mark::Mark() {
  if (const auto stream = current_stream()) event_ = std::make_unique<Event>(*stream);
}

Mark::~Mark() = default;
Mark::Mark(Mark&&) noexcept = default;

bool Mark::passed() const { return event_ == nullptr || event_->event.query(); }

}  // namespace lamina::devices
