// SPDX-License-Identifier: Apache-2.0
#include "lamina/value/guarded.h"

#include <ATen/ops/alias.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <memory>
#include <utility>

#include "lamina/base/str.h"
#include "lamina/value/slice_layer.h"
#include "lamina/value/wrapper_key.h"

namespace lamina::value {
namespace {

// The parameter that a slice is of, and where the slice is cut. Copies of a TensorImpl have it, too.
struct GuardedSlice : c10::BackendMeta {
  GuardedSlice(std::string of, at::IntArrayRef slice, at::IntArrayRef all)
      : name(std::move(of)), here(slice.vec()), whole(all.vec()) {
    const auto [own, others] = std::ranges::mismatch(here, whole);
    if (own != here.end()) cut = {static_cast<int>(own - here.begin()), *others};
  }
  std::string name;
  std::vector<std::int64_t> here, whole;
  WhereCut cut{WhereCut::kTorn, 0};
  bool is_gradient = false;
  std::shared_ptr<SliceLayer> layer = std::make_shared<SliceLayer>();  // of the parameter, and of what comes of it
};

thread_local int open_here = 0;
thread_local bool judged_here = false;
thread_local bool updating_here = false;

c10::intrusive_ptr<GuardedSlice> slice_of(const at::Tensor& tensor) {
  return c10::dynamic_intrusive_pointer_cast<GuardedSlice>(
      tensor.unsafeGetTensorImpl()->get_backend_meta_intrusive_ptr());
}

void guard(const at::Tensor& tensor, c10::intrusive_ptr<GuardedSlice> slice) {
  tensor.unsafeGetTensorImpl()->set_backend_meta(std::move(slice));
  set_keys(tensor, tensor.key_set().add(kWrapperKey));
}

void guard_cut_at(const at::Tensor& made, const at::Tensor& slice, int dim) {
  auto same = slice_of(slice);
  if (same->cut.dim != dim) {
    same = c10::make_intrusive<GuardedSlice>(*same);
    same->cut.dim = dim;
  }
  guard(made, std::move(same));
}

// The dimension of a view in which the cut one lies: that of as many elements, as far from one another.
int cut_of_view(const at::Tensor& view, const at::Tensor& slice, int cut) {
  if (cut < 0 || (view.sizes() == slice.sizes() && view.strides() == slice.strides())) return cut;
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
  const auto dim = static_cast<int>(cut + made.dim() - slice.dim());
  const bool is_there = cut >= 0 && dim >= 0 && made.size(dim) == slice.size(cut);
  guard_cut_at(made, slice, cut < 0 ? cut : is_there ? dim : WhereCut::kTorn);
}

void guard_joined(const at::Tensor& made, const at::Tensor& slice) { guard_cut_at(made, slice, WhereCut::kJoined); }

SliceLayer& layer_of(const at::Tensor& slice) { return *slice_of(slice)->layer; }

WhereCut where_cut(const at::Tensor& slice) { return slice_of(slice)->cut; }

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
