// SPDX-License-Identifier: Apache-2.0
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "tests/emulated/memory.h"
#include "tests/emulated/settings.h"
#include "tests/emulated/stream.h"

#include <c10/core/CachingDeviceAllocator.h>

// Devices, streams and events as c10 asks for them.
namespace emulated {
namespace {

struct Recorded {  // what c10::Event has
  std::shared_ptr<Event> event = Event::make();
  bool is_timed = false;
  c10::DeviceIndex device = 0;
};

Recorded& recorded(void* event) { return *static_cast<Recorded*>(event); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }

  c10::Device exchangeDevice(c10::Device device) const override {
    const auto before = getDevice();
    setDevice(device);
    return before;
  }

  c10::Device getDevice() const override { return {kType, static_cast<c10::DeviceIndex>(current_device())}; }

  void setDevice(c10::Device device) const override { set_device(device.index()); }

  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() < settings().devices) {
      set_device(device.index());
    }
  }

  c10::Stream getStream(c10::Device device) const override { return current_stream(device.index()); }

  c10::Stream getDefaultStream(c10::Device device) const override {
    return stream_of(device_or_current(device.index()), 0);
  }

  c10::Stream getNewStream(c10::Device device, int) const override {
    return new_stream(device_or_current(device.index()));
  }

  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }

  c10::Stream exchangeStream(c10::Stream stream) const override { return exchange_stream(stream); }

  void* getStreamNativeHandle(const c10::Stream stream) const override { return handle_of(stream); }

  c10::DeviceIndex deviceCount() const noexcept override { return static_cast<c10::DeviceIndex>(settings().devices); }

  bool queryStream(const c10::Stream& stream) const override {
    check(stream.device_index());
    return is_idle(stream);
  }

  void synchronizeStream(const c10::Stream& stream) const override { synchronize(stream); }

  void synchronizeDevice(c10::DeviceIndex device) const override { synchronize_device(device_or_current(device)); }

  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag flag) const override {
    check(stream.device_index());
    if (*event == nullptr) {
      *event = new Recorded;
    }
    recorded(*event).is_timed = flag == c10::EventFlag::BACKEND_DEFAULT;
    recorded(*event).device = stream.device_index();
    Event::record(recorded(*event).event, stream);
  }

  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) {
      Event::block(recorded(event).event, stream);
    }
  }

  bool queryEvent(void* event) const override {
    if (event == nullptr) {
      return true;
    }
    const bool passed = recorded(event).event->query();
    check(recorded(event).device);  // as each call of CUDA's does
    return passed;
  }

  void synchronizeEvent(void* event) const override {
    if (event != nullptr) {
      count_wait();
      recorded(event).event->wait();
    }
    check(current_device());
  }

  double elapsedTime(void* first, void* second, c10::DeviceIndex) const override {
    TORCH_CHECK(recorded(first).is_timed && recorded(second).is_timed,
                "emulated: elapsed_time needs events with timing");
    TORCH_CHECK(queryEvent(first) && queryEvent(second), "emulated: elapsed_time of an event that has not passed");
    return recorded(second).event->milliseconds_since(*recorded(first).event);
  }

  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override { delete static_cast<Recorded*>(event); }

  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    device_memory().recordStream(data, stream);
  }
};

const c10::impl::DeviceGuardImplRegistrar registrar(kType, new Guard);

}  // namespace
}  // namespace emulated
