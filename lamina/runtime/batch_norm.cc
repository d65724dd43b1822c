// SPDX-License-Identifier: Apache-2.0
// Stands in the way of torch's batch_norm: see [Note: running statistics].
#include "lamina/runtime/batch_norm.h"

#include <ATen/ops/batch_norm_native.h>
#include <torch/library.h>

#include "lamina/device/own_kernels.h"
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

}  // namespace

// A kernel for all devices at once would hide those that they have of the operations of which torch's is made.
void note_inferences(at::Device device) {
  static devices::OwnKernels kernels([](torch::Library& aten) { aten.impl("batch_norm", &batch_norm); });
  kernels.add_for(at::TensorOptions(device).computeDispatchKey());
}

}  // namespace lamina::runtime
