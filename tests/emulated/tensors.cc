// SPDX-License-Identifier: Apache-2.0
#include "tests/emulated/tensors.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/List.h>
#include <ATen/core/grad_mode.h>
#include <ATen/core/ivalue.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <utility>

#include "tests/emulated/stream.h"

namespace emulated {

bool is_ours(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == kType; }

at::Tensor bytes_of(const at::Tensor& tensor) {
  if (!tensor.defined()) {
    return tensor;
  }
  const auto options = at::TensorOptions().dtype(tensor.scalar_type()).device(at::kCPU);
  if (tensor.numel() == 0) {
    return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  }
  const auto* data = tensor.unsafeGetTensorImpl()->data();
  auto* bytes = is_ours(tensor) ? twin(data) : const_cast<void*>(data);
  auto made = at::from_blob(bytes, tensor.sizes(), tensor.strides(), options);
  made._set_conj(tensor.is_conj());
  made._set_neg(tensor.is_neg());
  return made;
}

at::Tensor twin(const at::Tensor& tensor) {
  TORCH_CHECK(!tensor.defined() || is_ours(tensor), "emulated: a kernel with a tensor on ", tensor.device());
  return bytes_of(tensor);
}

at::Tensor outline(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
    return tensor;  // a number stays one
  }
  return at::empty_strided(tensor.sizes(), tensor.strides(),
                           at::TensorOptions().dtype(tensor.scalar_type()).device(at::kMeta));
}

std::optional<at::Tensor> outline(const std::optional<at::Tensor>& tensor) {
  return tensor ? std::optional(outline(*tensor)) : std::nullopt;
}

c10::IValue changed(const c10::IValue& value, const std::function<at::Tensor(const at::Tensor&)>& change) {
  if (value.isTensor()) {
    return change(value.toTensor());
  }
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) {
      list.push_back(change(tensor));
    }
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) {
      list.push_back(tensor ? std::optional(change(*tensor)) : std::nullopt);
    }
    return list;
  }
  return value;
}

at::Tensor empty_for(const at::Tensor& described, c10::Device device) {
  if (!described.defined()) {
    return described;
  }
  return at::empty_strided(described.sizes(), described.strides(), described.options().device(device));
}

void as_kernel(const std::function<void()>& run) {
  const c10::InferenceMode normal(false);
  const at::NoGradGuard no_gradients;
  const at::AutoDispatchBelowADInplaceOrView below;
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  run();
}

std::vector<at::Tensor> enqueue_kernel(c10::Device device, const std::vector<at::Tensor>& outlines,
                                       std::function<std::vector<at::Tensor>()> kernel) {
  check(device.index());
  const c10::DeviceGuard guard(device);
  std::vector<at::Tensor> results, twins;
  for (const auto& described : outlines) {
    results.push_back(empty_for(described, device));
    twins.push_back(twin(results.back()));
  }
  enqueue(current_stream(device.index()), [twins, kernel = std::move(kernel)] {
    as_kernel([&] {
      const auto made = kernel();
      for (std::size_t i = 0; i < twins.size(); ++i) {
        if (twins[i].defined()) {
          twins[i].copy_(made[i]);
        }
      }
    });
  });
  count_enqueued();
  return results;
}

}  // namespace emulated
