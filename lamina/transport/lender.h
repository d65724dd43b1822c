// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string_view>

#include "lamina/base/ids.h"

namespace lamina::transport {

// A transport that takes buffers from the rank's device to another rank's as they are: see [Note: lent memory].
class Lender {
 public:
  virtual ~Lender() = default;
  // True where a frame for that rank may hold this buffer of the device, which is ready when the frame is sent. Else it
  // has to be on the host. From any thread.
  virtual bool takes(base::Rank to, const at::Tensor& buffer) = 0;
};

// Less is copied through the host in the time that two ranks need to agree on a way.
inline constexpr std::int64_t kLeastLent = 64 << 10;

// True where a buffer of the device goes to a rank's device as it is. Each rank tells the others the kind of the memory
// that it lends; "" is none.
constexpr bool goes_lent(std::string_view own, std::string_view of_receiver, std::int64_t size_bytes) {
  return !own.empty() && own == of_receiver && size_bytes >= kLeastLent;
}

}  // namespace lamina::transport
