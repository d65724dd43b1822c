// SPDX-License-Identifier: Apache-2.0
// Stands in the way of torch's batch_norm: see [Note: running statistics].
#include <ATen/ops/batch_norm_native.h>
#include <torch/library.h>

#include "lamina/runtime/execution_context.h"
#include "lamina/runtime/running_statistics.h"
#include "lamina/value/reference_tensor.h"

namespace lamina::runtime {
namespace {

// torch's own, which says what becomes of running statistics.
at::Tensor batch_norm(const at::Tensor& input, const std::optional<at::Tensor>& weight,
                      const std::optional<at::Tensor>& bias, const std::optional<at::Tensor>& running_mean,
                      const std::optional<at::Tensor>& running_var, bool training, double momentum, double epsilon,
                      bool cudnn_enabled) {
  auto* context = ExecutionContext::current();
  auto* statistics = context != nullptr ? context->statistics() : nullptr;
  if (statistics != nullptr && running_mean && running_mean->defined() && !(training && momentum == 0)) {
    value::for_user([&] { statistics->note_call(*running_mean, training); });
  }
  return at::native::batch_norm(input, weight, bias, running_mean, running_var, training, momentum, epsilon,
                                cudnn_enabled);
}

TORCH_LIBRARY_IMPL(aten, Autograd, library) { library.impl("batch_norm", &batch_norm); }
// In inference mode.
TORCH_LIBRARY_IMPL(aten, CPU, library) { library.impl("batch_norm", &batch_norm); }
TORCH_LIBRARY_IMPL(aten, CUDA, library) { library.impl("batch_norm", &batch_norm); }

}  // namespace
}  // namespace lamina::runtime
