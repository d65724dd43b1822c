// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <unordered_map>

namespace lamina::frontend {

// The stretches that have made tensors. Of a tensor that no operation has returned, whoever has made the latest one in
// its memory counts.
class TensorMakers {
 public:
  void made(const at::Tensor& tensor, int stretch) {
    of_tensors_.insert_or_assign(tensor.unsafeGetTensorImpl(),
                                 Made<c10::TensorImpl>{c10::weak_intrusive_ptr(tensor.getIntrusivePtr()), stretch});
    if (!tensor.has_storage()) return;
    const auto& memory = tensor.storage();
    of_memory_.insert_or_assign(memory.unsafeGetStorageImpl(),
                                Made<c10::StorageImpl>{memory.getWeakStorageImpl(), stretch});
  }

  std::optional<int> of(const at::Tensor& tensor) const {
    if (const auto found = of_tensors_.find(tensor.unsafeGetTensorImpl()); found != of_tensors_.end())
      return found->second.stretch;
    if (!tensor.has_storage()) return std::nullopt;
    const auto found = of_memory_.find(tensor.storage().unsafeGetStorageImpl());
    return found == of_memory_.end() ? std::nullopt : std::optional(found->second.stretch);
  }

 private:
  template <class T>
  struct Made {
    c10::weak_intrusive_ptr<T> that;  // keeps its address from being another's
    int stretch = 0;
  };

  std::unordered_map<const c10::TensorImpl*, Made<c10::TensorImpl>> of_tensors_;
  std::unordered_map<const c10::StorageImpl*, Made<c10::StorageImpl>> of_memory_;
};

}  // namespace lamina::frontend
