// SPDX-License-Identifier: Apache-2.0
#include "lamina/device/upload.h"

#include <ATen/ops/empty_like.h>

#include "lamina/device/capabilities.h"

namespace lamina::devices {

// Memory that is not pinned would be waited for, and what the caller has pinned is the caller's to change.
at::Tensor upload(const at::Tensor& tensor, at::Device device) {
  if (!is_host(tensor) || !has_streams(device)) return tensor.to(device);
  const auto pinned = tensor.is_pinned() ? at::empty_like(tensor, tensor.options().pinned_memory(true)).copy_(tensor)
                                         : tensor.pin_memory();
  return pinned.to(device, /*non_blocking=*/true);
}

}  // namespace lamina::devices
