// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/core/Device.h>

#include <optional>
#include <string>

namespace lamina::devices {

// [Note: lent memory] A transport that knows a kind of devices can take values from device to device by itself. It
// works in no stream of ours: it may read or write memory when an event has passed (LentBytes), and says when it has.
struct Lending {
  std::string memory;  // the kind of the memory, by the name that UCX has for it
  // Says where UCX finds the bytes to which a tensor points; nullptr: these are not lent.
  void* (*address)(const void* of_tensor);
};

// How the memory of such a device is lent; none where it is not.
std::optional<Lending> lending_of(at::Device device);

// Says how devices are lent of a type that this folder does not know. Once, before ranks connect.
void lend(at::DeviceType type, Lending how);

}  // namespace lamina::devices
