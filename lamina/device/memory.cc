// SPDX-License-Identifier: Apache-2.0
#include "lamina/device/memory.h"

#include <c10/core/CachingDeviceAllocator.h>

#include <type_traits>

#include "lamina/device/capabilities.h"
#include "lamina/device/rank_device.h"

namespace lamina::devices {
namespace {

// Asks torch's allocator of the rank's accelerator; none where there is no such allocator, or it does not tell.
template <class Ask>
std::optional<std::invoke_result_t<Ask, c10::DeviceAllocator&, at::DeviceIndex>> answer(const Ask& ask) {
  const auto device = rank_device();
  if (is_host(device)) return std::nullopt;
  try {
    return ask(*at::getDeviceAllocator(device.type()), device.index());
  } catch (const c10::Error&) {
    return std::nullopt;
  }
}

}  // namespace

std::optional<std::int64_t> free_memory() {
  return answer([](c10::DeviceAllocator& allocator, at::DeviceIndex device) {
    return static_cast<std::int64_t>(allocator.getMemoryInfo(device).first);
  });
}

std::optional<TensorBytes> tensor_bytes() {
  return answer([](c10::DeviceAllocator& allocator, at::DeviceIndex device) {
    const auto all = allocator.getDeviceStats(device).allocated_bytes[0];  // of blocks of every size
    return TensorBytes{all.current, all.peak};
  });
}

}  // namespace lamina::devices
