// SPDX-License-Identifier: Apache-2.0
#include "lamina/value/released.h"

#include "lamina/base/error.h"
#include "lamina/base/str.h"
#include "lamina/device/rank_device.h"
#include "lamina/value/guarded.h"
#include "lamina/value/reference_tensor.h"
#include "lamina/value/wrapper_key.h"

namespace lamina::value {
namespace {

// A tensor of a rank is on its device, if anywhere.
at::Device device_of(const at::Tensor& tensor) { return tensor.is_meta() ? tensor.device() : devices::rank_device(); }

// The storage-less stand-in for a value that is not here.
class ReleasedImpl : public c10::TensorImpl {
 public:
  ReleasedImpl(const at::Tensor& like, const std::string& why)
      : TensorImpl(c10::DispatchKeySet(like.options().device(device_of(like)).computeDispatchKey()).add(kWrapperKey),
                   like.dtype(), device_of(like)) {
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

void free(const c10::Storage& storage, const std::string& why) {
  c10::StorageImpl* memory = storage.unsafeGetStorageImpl();
  memory->set_data_ptr_noswap(c10::DataPtr(nullptr, memory->device()));
  memory->release_data_and_set_meta_custom_data_ptr_error_msg_(why);
}

}  // namespace

void release(at::Tensor& tensor, const std::string& why, const at::Tensor& like, Memory memory) {
  if (memory == Memory::kFreed && tensor.has_storage()) free(tensor.storage(), why);
  if (like.defined()) tensor.unsafeGetTensorImpl()->shallow_copy_from(like.getIntrusivePtr());
  tensor.mutable_grad().reset();
  tensor.unsafeGetTensorImpl()->shallow_copy_from(c10::make_intrusive<ReleasedImpl>(tensor, why));
}

bool is_released(const at::Tensor& tensor) {
  return tensor.defined() && tensor.key_set().has(kWrapperKey) && !is_pending(tensor) && !tensor.has_storage();
}

std::string where_released(const at::Tensor& tensor) {
  if (!is_released(tensor)) return "";
  const auto why = reason(tensor);
  return why.substr(0, why.find(';'));
}

void restore(at::Tensor& tensor, const at::Tensor& value) {
  base::internal_check(is_released(tensor), "a value for a tensor whose own was not released");
  if (tensor.sizes() != value.sizes() || tensor.scalar_type() != value.scalar_type()) {
    throw base::UsageError(base::str("a tensor of shape ", tensor.sizes(), " and type ", tensor.scalar_type(),
                                     " cannot be given a value of shape ", value.sizes(), " and type ",
                                     value.scalar_type()));
  }
  guard_as_before(tensor, [&] { tensor.unsafeGetTensorImpl()->shallow_copy_from(value.getIntrusivePtr()); });
}

void require_value(const at::Tensor& tensor, const std::string& operation) {
  if (is_released(tensor))
    throw base::UsageError(base::str(reason(tensor), " (", operation, ")"), base::Code{"model-value-elsewhere"});
}

}  // namespace lamina::value
