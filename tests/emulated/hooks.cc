// SPDX-License-Identifier: Apache-2.0
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StorageImpl.h>

#include <algorithm>
#include <cstring>

#include "tests/emulated/generator.h"
#include "tests/emulated/memory.h"
#include "tests/emulated/settings.h"
#include "tests/emulated/stream.h"

// Answers what ATen asks of the accelerator.
namespace emulated {
namespace {

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex device) const override { return is_touched(device); }

  c10::DeviceIndex deviceCount() const override { return static_cast<c10::DeviceIndex>(settings().devices); }
  void setCurrentDevice(c10::DeviceIndex device) const override { set_device(device); }
  c10::DeviceIndex getCurrentDevice() const override { return static_cast<c10::DeviceIndex>(current_device()); }

  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    const auto before = getCurrentDevice();
    set_device(device);
    return before;
  }

  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }

  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override { return default_generator(device); }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override { return make_generator(device); }

  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory(); }
  bool isPinnedPtr(const void* address) const override { return is_pinned(address); }

  c10::Device getDeviceFromPtr(void* address) const override {
    TORCH_CHECK(address >= device_range() && address < device_range() + kSpace, "emulated: no address of a device");
    return {kType, getCurrentDevice()};
  }

  void resizePrivateUse1Bytes(const c10::Storage& storage, std::size_t size) const override {
    const c10::DeviceGuard guard(storage.device());
    auto fresh = device_memory().allocate(size);
    if (const auto kept = std::min(size, storage.nbytes()); kept > 0) {
      device_memory().copy_data(fresh.get(), storage.data(), kept);
    }
    storage.unsafeGetStorageImpl()->set_data_ptr(std::move(fresh));
    storage.unsafeGetStorageImpl()->set_nbytes(size);
  }
};

[[maybe_unused]] const bool hooks_registered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  c10::register_privateuse1_backend("emulated");
  return true;
}();

}  // namespace
}  // namespace emulated
