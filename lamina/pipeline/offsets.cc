// SPDX-License-Identifier: Apache-2.0
#include "lamina/pipeline/offsets.h"

#include <ATen/ops/diff.h>

#include <algorithm>

namespace lamina::pipeline {

bool looks_like_offsets(const at::Tensor& tensor, std::span<const std::int64_t> lengths, bool is_called_so) {
  constexpr std::int64_t kFew = 4;
  const auto size = tensor.numel();
  if (tensor.layout() != at::kStrided || tensor.is_meta() || tensor.dim() != 1 || size < 2) return false;
  if (!at::isIntegralType(tensor.scalar_type(), /*includeBool=*/false)) return false;
  const auto is_other = [&](std::int64_t length) { return length != size; };
  if (!is_called_so && std::ranges::none_of(lengths, is_other)) return false;
  const auto last = tensor[size - 1].item<std::int64_t>();
  if (tensor[0].item<std::int64_t>() != 0 || last <= 0) return false;
  const auto steps = tensor.diff();
  if (steps.lt(0).any().item<bool>()) return false;
  if (is_called_so) return true;
  if (std::ranges::any_of(lengths, [&](auto length) { return is_other(length) && length == last; })) return true;
  const bool rises = steps.gt(0).all().item<bool>(), counts = steps.eq(1).all().item<bool>();
  return rises && !counts && size >= kFew &&
         std::ranges::any_of(lengths, [&](auto length) { return length > size && length >= last; });
}

}  // namespace lamina::pipeline
