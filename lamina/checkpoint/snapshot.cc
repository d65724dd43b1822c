// SPDX-License-Identifier: Apache-2.0
#include "lamina/checkpoint/snapshot.h"

#include <c10/core/GradMode.h>

#include "lamina/device/capabilities.h"
#include "lamina/device/copies.h"
#include "lamina/device/rank_device.h"
#include "lamina/value/guarded.h"
#include "lamina/value/large_blocks.h"

namespace lamina::checkpoint {
namespace {

constexpr std::int64_t kAlignment = 64;

std::int64_t room_for(const Part& part) { return (size_bytes(part) + kAlignment - 1) / kAlignment * kAlignment; }

// A device copies to pinned memory alone beside the host.
at::Tensor new_memory(std::int64_t bytes) {
  return devices::has_streams(devices::rank_device()) ? devices::pinned_bytes(bytes) : value::large_block(bytes);
}

}  // namespace

std::shared_ptr<const devices::Mark> Snapshot::take(std::span<Part> parts) {
  const at::NoGradGuard no_grad;
  const value::Unguarded own_work;
  std::int64_t bytes = 0;
  for (const auto& part : parts) bytes += room_for(part);
  const bool is_still_written = copied_ != nullptr && !copied_->passed();  // for a save that was given up
  if (is_still_written || !memory_.defined() || memory_.numel() < bytes) {
    memory_ = at::Tensor();       // both at once would be too much
    memory_ = new_memory(bytes);  // the first save makes every page
  }
  std::int64_t at = 0;
  for (auto& part : parts) {
    const auto elements = count(part.region);
    auto copy = memory_.narrow(0, at, size_bytes(part)).view(part.elements.scalar_type());
    if (elements > 0) copy.copy_(part.elements.view({-1}).narrow(0, 0, elements), /*non_blocking=*/true);
    part.elements = std::move(copy);
    at += room_for(part);
  }
  return copied_ = std::make_shared<devices::Mark>();
}

}  // namespace lamina::checkpoint
