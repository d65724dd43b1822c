// SPDX-License-Identifier: Apache-2.0
#include "lamina/value/reference_impl.h"

#include "lamina/base/error.h"
#include "lamina/base/str.h"
#include "lamina/device/copies.h"
#include "lamina/value/wrapper_key.h"

namespace lamina::value {
namespace {

constexpr c10::DispatchKeySet kSubclass({c10::DispatchKey::Python, c10::DispatchKey::FuncTorchGradWrapper,
                                         c10::DispatchKey::FuncTorchBatched, c10::DispatchKey::Functionalize,
                                         c10::DispatchKey::Batched});

Rethrow user_rethrow = nullptr;

c10::DispatchKeySet keys_of(const TensorSpec& spec) {
  const auto options = at::TensorOptions().dtype(spec.dtype).device(spec.device);
  return c10::DispatchKeySet(options.computeDispatchKey()).add(kWrapperKey);
}

// Strides differ only where they address different elements: not along a dimension of one.
bool same_elements(at::IntArrayRef sizes, at::IntArrayRef a, at::IntArrayRef b) {
  for (std::size_t dim = 0; dim < sizes.size(); ++dim) {
    if (sizes[dim] == 0) return true;
  }
  for (std::size_t dim = 0; dim < sizes.size(); ++dim) {
    if (sizes[dim] != 1 && a[dim] != b[dim]) return false;
  }
  return true;
}

std::string described(const at::Tensor& tensor) {
  return base::str("shape ", tensor.sizes(), ", strides ", tensor.strides(), ", ", tensor.scalar_type(), ", ",
                   tensor.device());
}

}  // namespace

ReferenceImpl::ReferenceImpl(const TensorSpec& spec, std::shared_ptr<Source> source, Strides strides)
    : TensorImpl(keys_of(spec), c10::scalarTypeToTypeMeta(spec.dtype), spec.device),
      expected_strides_(strides),
      source_(std::move(source)) {
  set_sizes_and_strides(spec.sizes, spec.strides);
  set_storage_access_should_throw();
  if (!is_inference()) version_counter_ = source_->version_;
  // Else the engine, adding gradients, would ask for the memory to see whether it may add in place.
  if (strides == Strides::kAsTheyArrive) is_non_overlapping_and_dense_ = false;
}

std::shared_ptr<Source> ReferenceImpl::source() const {
  const std::scoped_lock lock(mutex_);
  return source_;
}

void ReferenceImpl::become() const {
  const auto source = this->source();
  if (!source) return;
  const auto value = [&] {
    const CleanDispatch clean;
    at::Tensor taken = source->take();
    devices::join_arrival(taken);
    materialise(taken);
    return taken;
  }();
  // Not before: a thread that waits for the value may hold Python's GIL and give it up meanwhile.
  const std::scoped_lock lock(mutex_);
  if (!source_) return;
  require_fits(value);
  // A tensor is no constant, whatever the way by which its memory is asked for.
  auto* self = const_cast<ReferenceImpl*>(this);
  self->take_over(*value.unsafeGetTensorImpl());
  self->source_.reset();
}

void ReferenceImpl::require_fits(const at::Tensor& value) const {
  const bool fits = value.defined() && is_plain(value) && value.has_storage() && value.sizes() == sizes() &&
                    value.dtype() == dtype() && value.device() == device() &&
                    (expected_strides_ == Strides::kAsTheyArrive || same_elements(sizes(), value.strides(), strides()));
  if (fits) return;
  throw base::UsageError(
      base::str("a value is not what was expected of it: expected a dense tensor (shape ", sizes(), ", strides ",
                strides(), ", ", c10::typeMetaToScalarType(dtype()), ", ", device(), "), got ",
                value.defined() ? base::str(is_plain(value) ? "one" : value.toString(), " (", described(value), ")")
                                : "none"),
      base::Code{"step-unlike-before"});
}

void ReferenceImpl::take_over(const TensorImpl& value) {
  if (expected_strides_ == Strides::kAsTheyArrive) {
    set_sizes_and_strides(value.sizes(), value.strides());
  }
  storage_ = value.unsafe_storage();
  storage_offset_ = value.storage_offset();
  storage_access_should_throw_ = false;
  pending_.store(false, std::memory_order_release);
  // The key goes last: another thread that does not see it any more does not take the lock.
  std::atomic_thread_fence(std::memory_order_release);
  key_set_ = key_set_.remove(kWrapperKey);
}

at::Tensor ReferenceImpl::alias() const {
  const TensorSpec spec{sizes().vec(), strides().vec(), c10::typeMetaToScalarType(dtype()), device()};
  auto source = this->source();
  return source ? make_reference(spec, std::move(source), expected_strides_) : at::Tensor();
}

void ReferenceImpl::become_for_user() const {
  for_user([this] { become(); });
}

bool ReferenceImpl::has_storage() const {
  if (pending()) become_for_user();
  return TensorImpl::has_storage();
}

const c10::Storage& ReferenceImpl::storage() const {
  if (pending()) become_for_user();
  return TensorImpl::storage();
}

c10::intrusive_ptr<c10::TensorImpl> ReferenceImpl::shallow_copy_and_detach(const c10::VariableVersion& version,
                                                                           bool allow_metadata_change) const {
  become_for_user();
  return TensorImpl::shallow_copy_and_detach(version, allow_metadata_change);
}

c10::intrusive_ptr<c10::TensorImpl> ReferenceImpl::shallow_copy_and_detach(c10::VariableVersion&& version,
                                                                           bool allow_metadata_change) const {
  become_for_user();
  return TensorImpl::shallow_copy_and_detach(std::move(version), allow_metadata_change);
}

void ReferenceImpl::shallow_copy_from(const c10::intrusive_ptr<TensorImpl>& other) {
  become_for_user();
  TensorImpl::shallow_copy_from(other);
}

void ReferenceImpl::release_resources() {
  source_.reset();
  TensorImpl::release_resources();
}

void set_rethrow(Rethrow rethrow) { user_rethrow = rethrow; }

void for_user(const std::function<void()>& work) {
  try {
    work();
  } catch (const base::Error&) {
    if (user_rethrow) user_rethrow(std::current_exception());
    throw;
  }
}

ReferenceImpl* pending_impl(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.key_set().has(kWrapperKey)) return nullptr;
  auto* impl = dynamic_cast<ReferenceImpl*>(tensor.unsafeGetTensorImpl());
  return impl && impl->pending() ? impl : nullptr;
}

bool is_plain(const at::Tensor& tensor) {
  return tensor.layout() == at::kStrided && !tensor.is_nested() && !tensor.is_quantized() && !tensor.is_conj() &&
         !tensor.is_neg() && !tensor._is_zerotensor() && !tensor.key_set().has_any(kSubclass);
}

// The functions that reference_tensor.h declares.

TensorSpec spec_of(const at::Tensor& tensor) {
  return {tensor.sizes().vec(), tensor.strides().vec(), tensor.scalar_type(), tensor.device()};
}

std::uint32_t version_of(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.is_inference()) return 0;
  return tensor.unsafeGetTensorImpl()->version_counter().current_version();
}

at::Tensor make_reference(const TensorSpec& spec, std::shared_ptr<Source> source, Strides strides) {
  return at::detail::make_tensor<ReferenceImpl>(spec, std::move(source), strides);
}

bool is_pending(const at::Tensor& tensor) { return pending_impl(tensor) != nullptr; }

std::shared_ptr<Source> source_of(const at::Tensor& tensor) {
  const auto* reference = pending_impl(tensor);
  return reference ? reference->source() : nullptr;
}

void materialise(const at::Tensor& tensor) {
  if (const auto* reference = pending_impl(tensor)) reference->become();
}

}  // namespace lamina::value
