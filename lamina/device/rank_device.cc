// SPDX-License-Identifier: Apache-2.0
#include "lamina/device/rank_device.h"

#include <ATen/Context.h>
#include <ATen/DeviceAccelerator.h>

#include <atomic>
#include <optional>

#include "lamina/base/error.h"
#include "lamina/base/str.h"
#include "lamina/device/capabilities.h"

namespace lamina::devices {
namespace {

std::atomic<at::Device> of_rank{at::Device(kHost)};
std::atomic<at::DeviceIndex> made_current{-1};  // by a job, and not by the program

// The accelerator whose devices can be used here; torch's own answer names one that it was only built for, too.
std::optional<at::DeviceType> accelerator() {
  const auto type = at::getAccelerator(/*checked=*/false);
  if (!type || !at::globalContext().getAcceleratorHooksInterface(*type).isAvailable()) return std::nullopt;
  if (at::accelerator::deviceCount() == 0) return std::nullopt;
  return type;
}

at::Device numbered(at::DeviceType type, int local_rank) {
  const auto current = at::accelerator::getDeviceIndex();
  if (current != 0 && current != made_current) return {type, current};
  return {type, static_cast<at::DeviceIndex>(local_rank % at::accelerator::deviceCount())};
}

// The device of that name; none where torch knows no such type.
std::optional<at::Device> named(const std::string& name) {
  try {
    return at::Device(name);
  } catch (const c10::Error&) {
    return std::nullopt;
  }
}

}  // namespace

at::Device rank_device() { return of_rank; }

at::Device choose_device(const std::string& asked, int local_rank, const std::string& source) {
  const auto here = accelerator();
  if (asked == "auto" && !here) return {kHost};
  if (here && (asked == "auto" || asked == "gpu")) return numbered(*here, local_rank);
  const auto device = named(asked);
  const bool is_own = device && is_host(*device) && device->index() <= 0;
  const bool is_there = device && here && device->type() == *here && device->index() < at::accelerator::deviceCount();
  if (!is_own && !is_there) {
    throw base::ConfigError(base::str(source, ": \"", asked, "\" is not a device of this machine; there are ",
                                      devices_here(), ", and \"auto\" takes the accelerator if there is one"));
  }
  if (is_own) return {kHost};
  return device->has_index() ? *device : numbered(device->type(), local_rank);
}

void set_rank_device(at::Device device) {
  of_rank = device;
  if (!has_streams(device) || at::accelerator::getDeviceIndex() == device.index()) return;
  at::accelerator::setDeviceIndex(device.index());
  made_current = device.index();
}

std::string devices_here() {
  const auto host = c10::DeviceTypeName(kHost, /*lower_case=*/true);
  const auto type = accelerator();
  if (!type) return host;
  const int last = at::accelerator::deviceCount() - 1;
  const auto first = at::Device(*type, 0).str();
  return base::str(host, ", ", first, last > 0 ? base::str(" to ", at::Device(*type, last).str()) : "");
}

}  // namespace lamina::devices
