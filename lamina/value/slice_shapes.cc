// SPDX-License-Identifier: Apache-2.0
#include "lamina/value/slice_shapes.h"

#include <torch/csrc/autograd/variable.h>

#include "lamina/base/error.h"
#include "lamina/value/guarded.h"
#include "lamina/value/guarded_slice.h"
#include "lamina/value/released.h"
#include "lamina/value/torch_version.h"

namespace lamina::value {
namespace {

namespace autograd = torch::autograd;

void give_shape(const at::Tensor& released, at::IntArrayRef sizes) {
  base::internal_check(is_released(released), "another shape for a tensor whose value was not released");
  auto* impl = released.unsafeGetTensorImpl();
  const bool allowed = impl->allow_tensor_metadata_change();
  impl->set_allow_tensor_metadata_change(true);
  impl->set_sizes_contiguous(sizes);
  impl->set_allow_tensor_metadata_change(allowed);
  if (autograd::impl::get_autograd_meta(released) == nullptr) return;
  // The node that adds up its gradients knows the shape of before.
  autograd::impl::set_grad_accumulator(released, NodeWeakPtr<autograd::Node>(NodePtr<autograd::Node>()));
}

}  // namespace

void become_whole(const at::Tensor& released, at::IntArrayRef sizes) {
  released.unsafeGetTensorImpl()->set_backend_meta(nullptr);
  give_shape(released, sizes);
}

void become_slice(const at::Tensor& released, const std::string& name, at::IntArrayRef sizes) {
  const auto whole = released.sizes().vec();
  give_shape(released, sizes);
  guard(released, name, whole);
}

}  // namespace lamina::value
