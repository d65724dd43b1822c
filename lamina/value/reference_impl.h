// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <atomic>
#include <memory>
#include <mutex>

#include "lamina/value/reference_tensor.h"

namespace lamina::value {

// The tensor behind a reference: see [Note: reference tensors].
class ReferenceImpl final : public c10::TensorImpl {
 public:
  ReferenceImpl(const TensorSpec& spec, std::shared_ptr<Source> source, Strides strides);

  bool pending() const { return pending_.load(std::memory_order_acquire); }
  Strides expected_strides() const { return expected_strides_; }
  std::shared_ptr<Source> source() const;  // nullptr when it has become its value
  void become() const;
  void become_for_user() const;  // the same, where errors are thrown as set_rethrow() says

  // A tensor of its own without history that shares its value, as detach() gives; undefined when it has become it.
  at::Tensor alias() const;

  // Whatever asks for the memory. Operations come by way of the wrapper key; pickle, numpy, tolist, .data and the like
  // come this way, and would find no memory.
  bool has_storage() const override;
  const c10::Storage& storage() const override;
  c10::intrusive_ptr<TensorImpl> shallow_copy_and_detach(const c10::VariableVersion& version,
                                                         bool allow_metadata_change) const override;
  c10::intrusive_ptr<TensorImpl> shallow_copy_and_detach(c10::VariableVersion&& version,
                                                         bool allow_metadata_change) const override;
  void shallow_copy_from(const c10::intrusive_ptr<TensorImpl>& other) override;

  void release_resources() override;  // with the last strong reference; autocast's cache keeps weak ones

 private:
  void require_fits(const at::Tensor& value) const;
  void take_over(const TensorImpl& value);
  const char* tensorimpl_type_name() const override { return "ReferenceImpl"; }

  const Strides expected_strides_;
  std::atomic<bool> pending_ = true;
  mutable std::mutex mutex_;  // of becoming; held for a moment, never while waiting
  std::shared_ptr<Source> source_;
};

// The pending reference behind `tensor`, or nullptr.
ReferenceImpl* pending_impl(const at::Tensor& tensor);

// Dense and strided, and no subclass, lazy conjugate or wrapper of a transform: what a reference can stand for.
bool is_plain(const at::Tensor& tensor);

// The modes that a value is made under, wherever it happens to be read: no gradient or inference mode, no autocast, no
// mode or transform sees it.
class CleanDispatch {
  const c10::InferenceMode normal_{false};
  const c10::AutoGradMode no_grad_{false};
  // Copying a TensorImpl asks the modes too, unless Python is excluded.
  const c10::impl::ForceDispatchKeyGuard keys_{
      c10::default_included_set, c10::default_excluded_set | c10::DispatchKeySet(c10::DispatchKey::Python)};
};

}  // namespace lamina::value
