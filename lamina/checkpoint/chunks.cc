// SPDX-License-Identifier: Apache-2.0
#include "lamina/checkpoint/chunks.h"

#include <algorithm>

#include "lamina/device/capabilities.h"
#include "lamina/value/guarded.h"

namespace lamina::checkpoint {

std::span<std::byte> bytes_of(const at::Tensor& tensor) {
  return {static_cast<std::byte*>(tensor.data_ptr()), tensor.nbytes()};
}

void for_each_chunk(const at::Tensor& tensor, std::int64_t elements,
                    const std::function<void(std::span<const std::byte>)>& take) {
  constexpr std::int64_t kChunkBytes = std::int64_t{1} << 20;
  const value::Unguarded own_work;
  const auto flat = tensor.view({-1});
  const auto step = kChunkBytes / static_cast<std::int64_t>(flat.element_size());
  for (std::int64_t at = 0; at < elements; at += step) {
    const auto chunk = flat.narrow(0, at, std::min(step, elements - at));
    take(bytes_of(devices::on_host(chunk)));
  }
}

}  // namespace lamina::checkpoint
