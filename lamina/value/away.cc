// SPDX-License-Identifier: Apache-2.0
#include "lamina/value/away.h"

#include <mutex>

#include "lamina/value/guarded.h"
#include "lamina/value/reference_tensor.h"
#include "lamina/value/torch_version.h"
#include "lamina/value/wrapper_key.h"

namespace lamina::value {
namespace {

std::mutex mutex;
std::weak_ptr<Home> home_of_all;  // under it

std::shared_ptr<Home> home() {
  const std::lock_guard lock(mutex);
  return home_of_all.lock();
}

// The key set of a TensorImpl, which torch lets none but its own classes change.
struct Keys : c10::TensorImpl {
  static constexpr auto kOf = &Keys::key_set_;
};

void drop_key(const at::Tensor& tensor) { set_keys(tensor, tensor.key_set().remove(kWrapperKey)); }

}  // namespace

void set_keys(const at::Tensor& tensor, c10::DispatchKeySet keys) { tensor.unsafeGetTensorImpl()->*Keys::kOf = keys; }

c10::StorageImpl* memory_of(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
}

c10::DataPtr memory_that_keeps(at::Tensor tensor) {
  auto* data = tensor.mutable_data_ptr();
  const auto device = tensor.device();
  return {data, new at::Tensor(std::move(tensor)), [](void* kept) { delete static_cast<at::Tensor*>(kept); }, device};
}

void set_home(std::weak_ptr<Home> home) {
  const std::lock_guard lock(mutex);
  home_of_all = std::move(home);
}

void send_away(const at::Tensor& tensor, const std::string& why) {
  auto* memory = memory_of(tensor);
  memory->set_data_ptr_noswap(c10::DataPtr(nullptr, memory->device()));
  forbid_reading(*memory, why);
  set_keys(tensor, tensor.key_set().add(kWrapperKey));
}

void bring_back(const at::Tensor& tensor, c10::DataPtr memory) {
  auto* own = memory_of(tensor);
  allow_reading(*own);
  own->set_data_ptr_noswap(std::move(memory));
  if (!is_slice(tensor)) drop_key(tensor);
}

bool is_away(const at::Tensor& tensor) {
  return tensor.defined() && tensor.key_set().has(kWrapperKey) && !is_pending(tensor) && tensor.has_storage() &&
         !is_guarded(tensor);
}

void bring(const at::Tensor& tensor, const std::string& operation) {
  if (!is_away(tensor)) return;
  if (const auto found = home()) found->bring(tensor, operation);
  if (is_away(tensor)) drop_key(tensor);  // another tensor of this memory, whose value came; or which now says why not
}

}  // namespace lamina::value
