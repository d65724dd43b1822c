// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>

namespace lamina::devices {

// The bytes of memory that processes may still take on the rank's accelerator. None where nobody says, and where the
// rank computes on the host: see environment::available_memory().
std::optional<std::int64_t> free_memory();

// The bytes that tensors of this process have on the rank's accelerator, now and at most since it began or torch's peak
// was last reset. None as above.
struct TensorBytes {
  std::int64_t now = 0;
  std::int64_t peak = 0;
};
std::optional<TensorBytes> tensor_bytes();

}  // namespace lamina::devices
