// SPDX-License-Identifier: Apache-2.0
#include "lamina/value/moved.h"

#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/variable.h>

#include "lamina/value/guarded.h"

namespace lamina::value {
namespace {

// Backwards that are to come make another node, which takes gradients of the new device, as where torch's set_data
// moves a tensor; that one refuses devices that the build of torch does not know.
void forget_accumulator(const at::Tensor& tensor) {
  auto* meta = torch::autograd::impl::get_autograd_meta(tensor);
  if (meta == nullptr) return;
  const std::lock_guard lock(meta->mutex_);
  meta->grad_accumulator_.reset();
}

}  // namespace

void move_in_place(const at::Tensor& tensor, at::Device device) {
  if (!tensor.has_storage() || tensor.device() == device || tensor.is_meta()) return;
  const at::NoGradGuard no_grad;
  at::Tensor gradient = tensor.grad();
  tensor.unsafeGetTensorImpl()->shallow_copy_from(tensor.detach().to(device).getIntrusivePtr());
  guard_again(tensor);
  forget_accumulator(tensor);
  if (gradient.defined()) tensor.mutable_grad() = gradient.to(device);
}

}  // namespace lamina::value
