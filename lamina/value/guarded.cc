// SPDX-License-Identifier: Apache-2.0
#include "lamina/value/guarded.h"

#include <ATen/ops/alias.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include "lamina/base/str.h"
#include "lamina/value/wrapper_key.h"

namespace lamina::value {
namespace {

// The parameter that a slice is of. Copies of a TensorImpl have it, too.
struct GuardedSlice : c10::BackendMeta {
  GuardedSlice(std::string of, at::IntArrayRef slice, at::IntArrayRef all)
      : name(std::move(of)), here(slice.vec()), whole(all.vec()) {}
  const std::string name;
  const std::vector<std::int64_t> here, whole;
};

thread_local int open_here = 0;
thread_local bool updating_here = false;

c10::intrusive_ptr<GuardedSlice> slice_of(const at::Tensor& tensor) {
  return c10::dynamic_intrusive_pointer_cast<GuardedSlice>(
      tensor.unsafeGetTensorImpl()->get_backend_meta_intrusive_ptr());
}

void guard(const at::Tensor& tensor, c10::intrusive_ptr<GuardedSlice> slice) {
  tensor.unsafeGetTensorImpl()->set_backend_meta(std::move(slice));
  set_keys(tensor, tensor.key_set().add(kWrapperKey));
}

}  // namespace

void guard(const at::Tensor& slice, const std::string& name, at::IntArrayRef whole) {
  if (!slice.is_meta()) guard(slice, c10::make_intrusive<GuardedSlice>(name, slice.sizes(), whole));
}

void guard_again(const at::Tensor& slice) {
  if (slice_of(slice)) set_keys(slice, slice.key_set().add(kWrapperKey));
}

void guard_like(const at::Tensor& made, const at::Tensor& slice) { guard(made, slice_of(slice)); }

void guard_as_before(const at::Tensor& tensor, const std::function<void()>& set) {
  const auto slice = slice_of(tensor);
  set();
  auto* impl = tensor.unsafeGetTensorImpl();
  if (slice_of(tensor) != slice) impl->set_backend_meta(slice);
  if (slice && tensor.sizes() == slice->here) return guard_again(tensor);
  if (tensor.key_set().has(kWrapperKey) && tensor.has_storage()) set_keys(tensor, tensor.key_set().remove(kWrapperKey));
}

bool is_slice(const at::Tensor& tensor) {
  return tensor.defined() && tensor.key_set().has(kWrapperKey) && slice_of(tensor);
}

bool is_guarded(const at::Tensor& tensor) {
  if (!is_slice(tensor) || !tensor.has_storage()) return false;
  auto* memory = tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
  return memory->_mutable_data_ptr_no_checks().get() != nullptr;
}

std::string why_guarded(const at::Tensor& tensor) {
  if (!is_guarded(tensor)) return "";
  const auto slice = slice_of(tensor);
  return base::str(slice->name, " is sliced, and this rank has ", at::IntArrayRef(slice->here), " of its ",
                   at::IntArrayRef(slice->whole));
}

std::string name_guarded(const at::Tensor& tensor) { return is_slice(tensor) ? slice_of(tensor)->name : ""; }

at::Tensor unguarded(const at::Tensor& slice) {
  if (!is_guarded(slice)) return slice;
  const c10::impl::ExcludeDispatchKeyGuard as_it_is(kWrapperKey);
  auto same = at::alias(slice);
  if (same.key_set().has(kWrapperKey)) set_keys(same, same.key_set().remove(kWrapperKey));
  return same;
}

Unguarded::Unguarded() { ++open_here; }
Unguarded::~Unguarded() { --open_here; }
bool Unguarded::here() { return open_here > 0; }

void set_updating(bool updates) { updating_here = updates; }
bool is_updating() { return updating_here; }

}  // namespace lamina::value
