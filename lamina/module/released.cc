// SPDX-License-Identifier: Apache-2.0
#include "lamina/module/released.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include "lamina/base/error.h"
#include "lamina/base/str.h"

namespace lamina::module {
namespace {

// What stands for a value that is not here.
class Absent : public c10::TensorImpl {
 public:
  Absent(const at::Tensor& like, const std::string& why)
      : TensorImpl(c10::DispatchKeySet(like.options().computeDispatchKey()).add(kReleasedKey), like.dtype(),
                   like.device()) {
    set_sizes_and_strides(like.sizes(), like.strides());
    release_storage_and_set_meta_custom_data_ptr_error_msg_(why);
  }
};

// The text that `tensor` was released with: torch keeps it as what an access of the storage throws.
std::string reason(const at::Tensor& tensor) {
  try {
    tensor.storage();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "a tensor whose value is on another rank was used";
}

void refuse(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const auto count = op.schema().arguments().size();
  const auto refuse_one = [&](const at::Tensor& tensor) {
    if (is_released(tensor)) throw base::UsageError(base::str(reason(tensor), " (", op.schema().name(), ")"));
  };
  for (auto value = stack->end() - static_cast<std::ptrdiff_t>(count); value != stack->end(); ++value) {
    if (value->isTensor()) refuse_one(value->toTensor());
    if (value->isList()) {
      for (const auto& item : value->toListRef()) {
        if (item.isTensor()) refuse_one(item.toTensor());
      }
    }
  }
  throw base::UsageError(base::str("a tensor whose value is on another rank was used in ", op.schema().name()));
}

TORCH_LIBRARY_IMPL(_, TESTING_ONLY_GenericWrapper, library) {
  static_assert(kReleasedKey == c10::DispatchKey::TESTING_ONLY_GenericWrapper);
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&refuse>());
}

}  // namespace

void release(at::Tensor& tensor, const std::string& why) {
  if (is_released(tensor)) return;
  tensor.mutable_grad().reset();
  tensor.unsafeGetTensorImpl()->shallow_copy_from(c10::make_intrusive<Absent>(tensor, why));
}

bool is_released(const at::Tensor& tensor) { return tensor.defined() && tensor.key_set().has(kReleasedKey); }

}  // namespace lamina::module
