// SPDX-License-Identifier: Apache-2.0
#include "lamina/tensor_parallel/same_batch.h"

#include <ATen/TensorSubclassLikeUtils.h>
#include <ATen/autocast_mode.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <set>

#include "lamina/base/hash.h"
#include "lamina/base/str.h"
#include "lamina/device/capabilities.h"
#include "lamina/value/guarded.h"
#include "lamina/value/reference_tensor.h"

namespace lamina::tensor_parallel {
namespace {

std::string_view bytes_of(const at::Tensor& tensor) {
  return {static_cast<const char*>(tensor.const_data_ptr()), tensor.nbytes()};
}

// A value that is still on its way from another rank is not waited for.
bool has_bytes(const at::Tensor& tensor) {
  return tensor.defined() && tensor.layout() == at::kStrided && !tensor.is_meta() && !tensor.is_quantized() &&
         !value::is_pending(tensor) && !value::is_slice(tensor) && tensor.has_storage() &&
         !at::isTensorSubclassLike(tensor);
}

std::uint64_t hash_of_kind(const at::Tensor& tensor, std::uint64_t sum) {
  sum = base::hash64(static_cast<std::int64_t>(tensor.scalar_type()), sum);
  for (const auto extent : tensor.sizes()) sum = base::hash64(extent, sum);
  return sum;
}

}  // namespace

CallHashes hashes_of(const ModelCall& call) {
  std::uint64_t values = call.tensors.size();
  for (const auto& tensor : call.tensors) {
    if (!has_bytes(tensor)) continue;
    values = hash_of_kind(tensor, values);
    if (!devices::is_host(tensor) && !call.on_devices) continue;
    values =
        base::hash64(bytes_of(devices::on_host(tensor.detach().resolve_conj().resolve_neg().contiguous())), values);
  }
  std::uint64_t gradients = c10::GradMode::is_enabled() ? 1 : 0;
  std::set<at::DeviceType> types{devices::kHost};
  for (const auto& tensor : call.tensors) {
    if (tensor.defined()) types.insert(tensor.device().type());
  }
  for (const auto device : types) {
    if (!at::autocast::is_autocast_available(device)) continue;
    const bool casts = at::autocast::is_autocast_enabled(device);
    gradients =
        base::hash64(casts ? static_cast<std::int64_t>(at::autocast::get_autocast_dtype(device)) : -1, gradients);
  }
  CallHashes given{};
  const auto put = [&](CallTrait what, std::uint64_t hash) {
    given[static_cast<std::size_t>(what)] = static_cast<std::int64_t>(hash);
  };
  put(CallTrait::kValues, values);
  put(CallTrait::kTraining, base::hash64(call.training));
  put(CallTrait::kTrained, base::hash64(call.trained));
  put(CallTrait::kGradients, gradients);
  return given;
}

base::DesyncError given_apart(CallTrait what, base::Rank one, base::Rank other) {
  const auto ranks = base::str("ranks ", std::min(one, other), " and ", std::max(one, other), " of a TP_GROUP ");
  switch (what) {
    case CallTrait::kValues:
      return base::DesyncError(ranks +
                                   "have called the model with other values, and with prescaled_batch: true they "
                                   "read one batch: read data by rdp_rank(), or take prescaled_batch: false",
                               base::Code{"tp-other-batch"});
    case CallTrait::kTraining:
      return base::DesyncError(ranks +
                                   "have called the model in other modes: a module that trains on one of them "
                                   "evaluates on the other; call train() and eval() alike on both",
                               base::Code{"tp-other-mode"});
    case CallTrait::kTrained:
      return base::DesyncError(ranks +
                                   "have called the model with other parameters to train: one that requires a "
                                   "gradient on one of them does not on the other; freeze the same on both",
                               base::Code{"tp-other-mode"});
    default:
      return base::DesyncError(ranks +
                                   "have called the model in other modes: with gradients on one of them and "
                                   "without on the other, or under another autocast; take the same on both",
                               base::Code{"tp-other-mode"});
  }
}

}  // namespace lamina::tensor_parallel
