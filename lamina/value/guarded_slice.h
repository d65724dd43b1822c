// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "lamina/value/slice_layer.h"
#include "lamina/value/where_cut.h"
#include "lamina/value/wrapper_key.h"

// Notes of a guarded tensor, in its TensorImpl: see [Note: guarded slices].
namespace lamina::value {

// The parameter that a slice is of, and where the slice is cut. Copies of a TensorImpl have it, too.
struct GuardedSlice : c10::BackendMeta {
  // One of the tensors that this one was joined of.
  struct JoinedPart {
    std::int64_t size;                       // how many places it has
    c10::intrusive_ptr<GuardedSlice> slice;  // or none, for a whole
  };

  GuardedSlice(std::string of, at::IntArrayRef slice, at::IntArrayRef all)
      : name(std::move(of)), here(slice.vec()), whole(all.vec()) {
    const auto [own, others] = std::ranges::mismatch(here, whole);
    if (own != here.end()) cut = {static_cast<int>(own - here.begin()), *others};
  }
  std::string name;
  std::vector<std::int64_t> here, whole;
  WhereCut cut{WhereCut::kTorn, 0};
  bool is_gradient = false;
  std::vector<JoinedPart> parts;                                       // in their order, where the cut is kJoined
  int along = 0;                                                       // the dimension of their places
  std::shared_ptr<SliceLayer> layer = std::make_shared<SliceLayer>();  // of the parameter, and of what comes of it
};

using SliceOf = c10::intrusive_ptr<GuardedSlice>;

inline SliceOf slice_of(const at::Tensor& tensor) {
  return c10::dynamic_intrusive_pointer_cast<GuardedSlice>(
      tensor.unsafeGetTensorImpl()->get_backend_meta_intrusive_ptr());
}

inline void guard(const at::Tensor& tensor, SliceOf slice) {
  tensor.unsafeGetTensorImpl()->set_backend_meta(std::move(slice));
  set_keys(tensor, tensor.key_set().add(kWrapperKey));
}

// Returns a slice that is cut in another dimension.
inline SliceOf with_cut(const SliceOf& slice, int dim) {
  if (slice->cut.dim == dim) return slice;
  auto same = c10::make_intrusive<GuardedSlice>(*slice);
  same->cut.dim = dim;
  return same;
}

}  // namespace lamina::value
