// SPDX-License-Identifier: Apache-2.0
#include "lamina/value/reference_tensor.h"

#include "lamina/value/reference_impl.h"

namespace lamina::value {

TensorSpec spec_of(const at::Tensor& tensor) {
  return {tensor.sizes().vec(), tensor.strides().vec(), tensor.scalar_type(), tensor.device()};
}

std::uint32_t version_of(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.is_inference()) return 0;
  return tensor.unsafeGetTensorImpl()->version_counter().current_version();
}

at::Tensor make_reference(const TensorSpec& spec, std::shared_ptr<Source> source, Strides strides) {
  return at::detail::make_tensor<ReferenceImpl>(spec, std::move(source), strides);
}

bool is_pending(const at::Tensor& tensor) { return pending_impl(tensor) != nullptr; }

std::shared_ptr<Source> source_of(const at::Tensor& tensor) {
  const auto* reference = pending_impl(tensor);
  return reference ? reference->source() : nullptr;
}

void materialise(const at::Tensor& tensor) {
  if (const auto* reference = pending_impl(tensor)) reference->become();
}

}  // namespace lamina::value
