// SPDX-License-Identifier: Apache-2.0
#include "lamina/data_parallel/buffers.h"

#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>

#include <map>

namespace lamina::data_parallel {
namespace {

constexpr std::int64_t kAligned = 16;  // bytes: for elements of any type

// A tensor, and the part of the bytes that travel which holds its value.
using BufferPairs = std::vector<std::pair<at::Tensor, at::Tensor>>;

void broadcast_together(const std::vector<at::Tensor>& tensors, collective::Group& replicas, int root,
                        const collective::CallOptions& options) {
  std::vector<std::int64_t> begins{0};
  for (const auto& tensor : tensors) {
    const auto size_bytes = static_cast<std::int64_t>(tensor.nbytes());
    begins.push_back(begins.back() + (size_bytes + kAligned - 1) / kAligned * kAligned);
  }
  // All as bytes, in one tensor: the type does not matter to who only copies.
  auto bytes = at::empty({begins.back()}, tensors.front().options().dtype(at::kByte));
  BufferPairs parts;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const auto part = bytes.narrow(0, begins[i], static_cast<std::int64_t>(tensors[i].nbytes()));
    parts.emplace_back(tensors[i], part.view(tensors[i].scalar_type()).view(tensors[i].sizes()));
  }
  for (const auto& [tensor, part] : parts) part.copy_(tensor);
  replicas.broadcast(bytes, root, options)->wait();
  for (const auto& [tensor, part] : parts) tensor.copy_(part);
}

}  // namespace

void broadcast(std::span<const NamedTensor> tensors, collective::Group& replicas, int root,
               const collective::CallOptions& options) {
  const c10::AutoGradMode no_grad(false);
  std::map<std::string, std::vector<at::Tensor>> by_device;
  for (const auto& [name, tensor] : tensors) by_device[tensor.device().str()].push_back(tensor);
  for (const auto& [device, together] : by_device) broadcast_together(together, replicas, root, options);
}

}  // namespace lamina::data_parallel
