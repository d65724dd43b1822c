// SPDX-License-Identifier: Apache-2.0
#include "lamina/remote/crossing.h"

#include <c10/core/impl/LocalDispatchKeySet.h>

#include "lamina/base/error.h"
#include "lamina/base/str.h"
#include "lamina/runtime/thread_state.h"

namespace lamina::remote {
namespace {

[[noreturn]] void refuse(const std::string& module, const char* what) {
  throw base::UsageError(base::str(module.empty() ? "the model" : module, ", which lives on another rank, was called ",
                                   what, "; call it outside, or place it in its caller's partition with set_partition"),
                         base::Code{"step-transform"});
}

}  // namespace

void require_can_cross(const std::string& module, const value::Value& arguments) {
  runtime::check_modes_travel(module);
  using c10::impl::tls_is_dispatch_key_included;
  if (tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode)) {
    refuse(module, "inside a transform of torch.func (grad, vmap, jvp, ...), which does not see other ranks");
  }
  if (tls_is_dispatch_key_included(c10::DispatchKey::Python)) {
    refuse(module, "under a Python dispatch mode (selective checkpointing is one), which does not see other ranks");
  }
  value::for_each_tensor(arguments, [&](const at::Tensor& tensor) {
    if (tensor.defined() && tensor._fw_grad(/*level=*/0).defined()) {
      refuse(module, "with a tangent of forward-mode AD, which is not carried to other ranks");
    }
  });
}

}  // namespace lamina::remote
