// SPDX-License-Identifier: Apache-2.0
#include "lamina/data_parallel/buffers.h"

#include <ATen/ops/cat.h>
#include <c10/core/GradMode.h>

#include <map>

#include "lamina/data_parallel/agreement.h"

namespace lamina::data_parallel {
namespace {

// All as bytes, in one tensor: the type does not matter to who only copies.
void broadcast_together(const std::vector<at::Tensor>& buffers, collective::ProcessGroup& replicas, int root) {
  std::vector<at::Tensor> pieces;
  for (const auto& buffer : buffers) pieces.push_back(buffer.contiguous().reshape({-1}).view(at::kByte));
  auto bytes = at::cat(pieces);
  replicas.broadcast(bytes, root);
  std::int64_t begin = 0;
  for (const auto& buffer : buffers) {
    const auto size_bytes = static_cast<std::int64_t>(buffer.nbytes());
    // A copy has memory of its own, aligned for any type.
    const auto piece = bytes.narrow(0, begin, size_bytes).clone();
    buffer.copy_(piece.view(buffer.scalar_type()).view(buffer.sizes()));
    begin += size_bytes;
  }
}

}  // namespace

void broadcast_buffers(std::span<const NamedTensor> buffers, collective::ProcessGroup& replicas, int root) {
  if (buffers.empty()) return;
  const c10::AutoGradMode no_grad(false);
  any_replica(buffers, {}, replicas);
  std::map<std::string, std::vector<at::Tensor>> by_device;
  for (const auto& buffer : buffers) by_device[buffer.tensor.device().str()].push_back(buffer.tensor);
  for (const auto& [device, tensors] : by_device) broadcast_together(tensors, replicas, root);
}

}  // namespace lamina::data_parallel
