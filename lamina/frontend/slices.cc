// SPDX-License-Identifier: Apache-2.0
#include "lamina/frontend/slices.h"

#include "lamina/tensor_parallel/slices.h"

namespace lamina::frontend {

layout::Share Member::positions(std::int64_t count) const {
  return tensor_parallel::shares_of(count, 1, degree)[static_cast<std::size_t>(index)];
}

tensor_parallel::Cut Member::cut(std::int64_t count) const {
  return {1, tensor_parallel::sizes_of(tensor_parallel::shares_of(count, 1, degree))};
}

std::vector<std::int64_t> whole_shape(const Slicings& slicings, const at::Tensor& tensor) {
  const auto found = slicings.find(tensor.unsafeGetTensorImpl());
  return found == slicings.end() ? std::vector<std::int64_t>() : tensor_parallel::whole_shape(tensor, found->second);
}

std::vector<std::int64_t> sizes_of_whole(const Slicings& slicings, const at::Tensor& tensor) {
  auto whole = whole_shape(slicings, tensor);
  return whole.empty() ? tensor.sizes().vec() : whole;
}

}  // namespace lamina::frontend
