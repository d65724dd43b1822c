// SPDX-License-Identifier: Apache-2.0
#include "lamina/foreign/tensor_parts.h"

#include <algorithm>
#include <utility>

#include "lamina/base/error.h"

namespace lamina::foreign {

using archive::SavedTensor;

SavedTensor joined(const std::vector<SavedTensor>& parts, const layout::Shape& shape) {
  auto whole = parts.front();
  whole.shape = shape;
  whole.pieces.clear();
  auto region = layout::whole(shape);
  const auto count = region.end;
  for (const auto& part : parts) {
    if (part.dtype != whole.dtype) throw base::FormatError(whole.name + ": its parts have different dtypes");
    if (part.pieces.empty()) throw base::FormatError(whole.name + ": its parts do not lie row by row");
    region.size = std::min(part.shape.at(0), count - region.begin);
    if (region.size <= 0) break;
    region.end = region.begin + region.size;
    whole.pieces.push_back({part.pieces[0].file, part.pieces[0].begin, region});
    region.begin = region.end;
  }
  return whole;
}

bool add_slice(SavedTensor& whole, const layout::Slicing& slicing, int slice, std::span<const SavedTensor> parts) {
  layout::ParameterLayout layout{.name = whole.name, .shape = whole.shape, .slicing = slicing};
  layout.dtype = parts.front().dtype;
  auto region = layout::held(layout, slice, 0);
  auto shape = whole.shape;
  shape[static_cast<std::size_t>(slicing.dim)] = region.extent;
  const auto count = region.end;
  if (parts.front().shape == shape) parts = parts.first(1);
  std::int64_t all = 0;
  for (const auto& part : parts) {
    if (part.pieces.empty() || part.dtype != whole.dtype) return false;
    if (part.shape != shape && (part.shape.size() != 1 || parts.size() == 1)) return false;
    region.begin = all;
    all += layout::numel(part.shape);
    region.end = std::min(all, count);
    region.size = std::max<std::int64_t>(region.end - region.begin, 0);
    if (region.size > 0) whole.pieces.push_back({part.pieces[0].file, part.pieces[0].begin, region});
  }
  return all >= count && all - count < std::ssize(parts);
}

std::vector<SavedTensor> by_name(const std::vector<SavedTensor>& tensors) {
  std::vector<SavedTensor> named;
  for (auto tensor : tensors) {
    const auto others = std::exchange(tensor.also, {});
    named.push_back(tensor);
    for (const auto& name : others) {
      tensor.name = name;
      named.push_back(tensor);
    }
  }
  return named;
}

}  // namespace lamina::foreign
