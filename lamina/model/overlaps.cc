// SPDX-License-Identifier: Apache-2.0
#include "lamina/model/overlaps.h"

#include <algorithm>
#include <cstdint>
#include <optional>
#include <tuple>

#include "lamina/value/away.h"
#include "lamina/value/released.h"

namespace lamina::model {
namespace {

// Bytes from the first to the last element of a tensor, on its device.
struct Range {
  std::tuple<c10::DeviceType, c10::DeviceIndex> device;
  std::uintptr_t begin, end;
  std::size_t number;
};

std::optional<Range> range_of(const at::Tensor& tensor, std::size_t number) {
  const bool has_memory = tensor.defined() && tensor.has_storage() && value::memory_of(tensor) != nullptr &&
                          !value::is_away(tensor) && !value::is_released(tensor) && !tensor.is_meta();
  if (!has_memory || tensor.numel() == 0) return {};
  const auto* data = static_cast<const char*>(tensor.storage().data());
  if (data == nullptr) return {};
  std::int64_t last = 0;
  for (std::int64_t i = 0; i < tensor.dim(); ++i) last += (tensor.size(i) - 1) * tensor.stride(i);
  const auto bytes = static_cast<std::int64_t>(tensor.element_size());
  const auto begin = reinterpret_cast<std::uintptr_t>(data + tensor.storage_offset() * bytes);
  return Range{{tensor.device().type(), tensor.device().index()}, begin, begin + (last + 1) * bytes, number};
}

}  // namespace

std::vector<std::vector<std::size_t>> overlaps(std::span<const at::Tensor> tensors) {
  std::vector<Range> ranges;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    if (const auto range = range_of(tensors[i], i)) ranges.push_back(*range);
  }
  std::ranges::sort(ranges, {}, [](const Range& each) { return std::tuple(each.device, each.begin, each.number); });
  std::vector<std::vector<std::size_t>> groups;
  for (std::size_t first = 0, next = 0; first < ranges.size(); first = next) {
    auto end = ranges[first].end;
    for (next = first + 1; next < ranges.size(); ++next) {
      if (ranges[next].device != ranges[first].device || ranges[next].begin >= end) break;
      end = std::max(end, ranges[next].end);
    }
    if (next - first < 2) continue;
    auto& group = groups.emplace_back();
    for (auto i = first; i < next; ++i) group.push_back(ranges[i].number);
    std::ranges::sort(group);
  }
  return groups;
}

}  // namespace lamina::model
