// SPDX-License-Identifier: Apache-2.0
#include "lamina/checkpoint/snapshot.h"

#include <c10/core/GradMode.h>

#include "lamina/value/guarded.h"
#include "lamina/value/large_blocks.h"

namespace lamina::checkpoint {
namespace {

constexpr std::int64_t kAlignment = 64;

std::int64_t room_for(const Part& part) { return (size_bytes(part) + kAlignment - 1) / kAlignment * kAlignment; }

}  // namespace

void Snapshot::take(std::span<Part> parts) {
  const at::NoGradGuard no_grad;
  const value::Unguarded own_work;
  std::int64_t bytes = 0;
  for (const auto& part : parts) bytes += room_for(part);
  if (!memory_.defined() || memory_.numel() < bytes) {
    memory_ = at::Tensor();               // both at once would be too much
    memory_ = value::large_block(bytes);  // the first save makes every page
  }
  std::int64_t at = 0;
  for (auto& part : parts) {
    const auto elements = count(part.region);
    auto copy = memory_.narrow(0, at, size_bytes(part)).view(part.elements.scalar_type());
    if (elements > 0) copy.copy_(part.elements.view({-1}).narrow(0, 0, elements));
    part.elements = std::move(copy);
    at += room_for(part);
  }
}

}  // namespace lamina::checkpoint
