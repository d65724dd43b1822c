// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace lamina::transport::ucx {

// A 1-D uint8 tensor of its own CPU memory, aligned to 64 bytes, for a received buffer. The system hands out large
// memory page by page, each zeroed first, which costs more than copying into it: large buffers that were freed are
// kept for the next of the same size, a quarter GiB at most in the process. Thread-safe.
at::Tensor receive_buffer(std::int64_t size_bytes);

}  // namespace lamina::transport::ucx
