// SPDX-License-Identifier: Apache-2.0
#include "lamina/value/guarded.h"

#include <ATen/ops/alias.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <utility>

#include "lamina/base/str.h"
#include "lamina/value/guarded_slice.h"
#include "lamina/value/slice_layer.h"
#include "lamina/value/wrapper_key.h"

namespace lamina::value {
namespace {

thread_local int open_here = 0;
thread_local bool judged_here = false;
thread_local bool updating_here = false;

void guard_cut_at(const at::Tensor& made, const at::Tensor& slice, int dim) {
  guard(made, with_cut(slice_of(slice), dim));
}

// The dimension of a view in which the cut one lies: that of as many elements, as far from one another.
int cut_of_view(const at::Tensor& view, const at::Tensor& slice, int cut) {
  if (view.sizes() == slice.sizes() && view.strides() == slice.strides()) return cut;
  if (cut < 0) return WhereCut::kTorn;
  int found = WhereCut::kTorn;
  for (int dim = 0; dim < view.dim(); ++dim) {
    if (view.size(dim) != slice.size(cut) || view.stride(dim) != slice.stride(cut)) continue;
    if (found >= 0) return WhereCut::kTorn;
    found = dim;
  }
  return found;
}

}  // namespace

void guard(const at::Tensor& slice, const std::string& name, at::IntArrayRef whole) {
  if (!slice.is_meta()) guard(slice, c10::make_intrusive<GuardedSlice>(name, slice.sizes(), whole));
}

void guard_again(const at::Tensor& slice) {
  if (slice_of(slice)) set_keys(slice, slice.key_set().add(kWrapperKey));
}

void guard_gradient(const at::Tensor& gradient, const at::Tensor& parameter) {
  if (!gradient.defined() || Unguarded::here() || !is_guarded(parameter) || is_slice(gradient)) return;
  const bool is_plain = gradient.has_storage() && !gradient.key_set().has(c10::DispatchKey::Python);
  if (!is_plain || gradient.sizes() != parameter.sizes()) return;
  auto slice = c10::make_intrusive<GuardedSlice>(*slice_of(parameter));
  slice->is_gradient = true;
  guard(gradient, std::move(slice));
}

void guard_view(const at::Tensor& made, const at::Tensor& slice) {
  guard_cut_at(made, slice, cut_of_view(made, slice, where_cut(slice).dim));
}

// Dimensions of what is computed of elements are counted from the last one.
void guard_like(const at::Tensor& made, const at::Tensor& slice) {
  const auto cut = where_cut(slice).dim;
  if (cut == WhereCut::kJoined && made.sizes() == slice.sizes()) return guard_cut_at(made, slice, cut);
  const auto dim = static_cast<int>(cut + made.dim() - slice.dim());
  const bool is_there = cut >= 0 && dim >= 0 && made.size(dim) == slice.size(cut);
  guard_cut_at(made, slice, is_there ? dim : WhereCut::kTorn);
}

SliceLayer& layer_of(const at::Tensor& slice) { return *slice_of(slice)->layer; }

WhereCut where_cut(const at::Tensor& slice) {
  const auto found = slice_of(slice);
  return found->cut.dim == WhereCut::kTorn ? WhereCut{WhereCut::kTorn, c10::multiply_integers(found->whole)}
                                           : found->cut;
}

bool is_gradient_of_slice(const at::Tensor& tensor) { return is_slice(tensor) && slice_of(tensor)->is_gradient; }

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
                   slice->is_gradient ? "gradient's " : "", at::IntArrayRef(slice->whole));
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

Judged::Judged() : before_(std::exchange(judged_here, true)), open_before_(std::exchange(open_here, 0)) {}
Judged::~Judged() {
  judged_here = before_;
  open_here = open_before_;
}
bool Judged::here() { return judged_here; }

void set_updating(bool updates) { updating_here = updates; }
bool is_updating() { return updating_here; }

}  // namespace lamina::value
