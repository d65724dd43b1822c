// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <cstdint>

namespace lamina::value {

// [Note: no room] What arrives for a device may find no room there. That is no error of the thread that brings it, and
// the rest of the message arrives. In the place of the memory there is a reference; decode() makes references of all
// tensors in it. Whoever reads one gets the device's error.

// Stands for so many bytes on a device which has had no room for them.
at::Tensor no_room(std::int64_t size_bytes, at::Device device, const c10::OutOfMemoryError& error);

}  // namespace lamina::value
