// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <functional>
#include <span>

namespace lamina::checkpoint {

// Hands on the bytes of a contiguous tensor's first `elements`, a MiB at a time: in place where the host can read
// them, else copied to it.
void for_each_chunk(const at::Tensor& tensor, std::int64_t elements,
                    const std::function<void(std::span<const std::byte>)>& take);

// The bytes of a contiguous tensor of the host.
std::span<std::byte> bytes_of(const at::Tensor& tensor);

}  // namespace lamina::checkpoint
