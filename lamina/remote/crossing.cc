// SPDX-License-Identifier: Apache-2.0
#include "lamina/remote/crossing.h"

#include <c10/core/impl/LocalDispatchKeySet.h>

#include <functional>

#include "lamina/base/error.h"
#include "lamina/base/str.h"
#include "lamina/device/role.h"
#include "lamina/runtime/thread_state.h"

namespace lamina::remote {
namespace {

[[noreturn]] void refuse(const std::string& module, const char* what) {
  throw base::UsageError(base::str(module.empty() ? "the model" : module, ", which lives on another rank, was called ",
                                   what, "; call it outside, or place it in its caller's partition with set_partition"),
                         base::Code{"step-transform"});
}

// Calls `visit` for each device of a tensor, and each one that is a value itself.
void for_each_device(const value::Value& tree, const std::function<void(at::Device, const char* kind)>& visit) {
  value::for_each_leaf(tree, [&](const value::Value& leaf) {
    if (const auto* tensor = leaf.get_if<at::Tensor>(); tensor != nullptr && tensor->defined()) {
      visit(tensor->device(), "a tensor on ");
    } else if (const auto* device = leaf.get_if<at::Device>()) {
      visit(*device, "the device ");
    }
  });
}

// `name` is the argument's or the result's.
void require_devices(const std::string& name, const value::Value& given) {
  for_each_device(
      given, [&](at::Device device, const char* kind) { devices::role_of(device, name, ", ", kind, device, ","); });
}

bool are_known(const value::Value& tree) {
  bool known = true;
  for_each_device(tree, [&](at::Device device, const char*) { known = known && devices::known_role(device); });
  return known;
}

// Arguments are those by position and those by name, as Python has them; or anything else.
void require_devices_of(const std::string& module, const value::Value& arguments) {
  if (are_known(arguments)) return;
  const auto of = base::str(" of ", module.empty() ? "the model" : module, ", which lives on another rank");
  const auto* call = arguments.get_if<value::Tuple>();
  const bool is_pair = call != nullptr && call->items.size() == 2;
  const auto* positional = is_pair ? call->items[0].get_if<value::Tuple>() : nullptr;
  const auto* named = is_pair ? call->items[1].get_if<value::Dict>() : nullptr;
  if (positional == nullptr || named == nullptr) return require_devices("an argument" + of, arguments);
  int position = 0;
  for (const auto& each : positional->items) require_devices(base::str("argument ", position++, of), each);
  for (const auto& [name, each] : named->items) {
    require_devices(base::str("argument '", name.as<std::string>(), "'", of), each);
  }
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
  require_devices_of(module, arguments);
}

void require_results_cross(const std::string& module, const value::Value& outputs) {
  if (are_known(outputs)) return;
  const auto of = base::str(" of ", module.empty() ? "the model" : module, ", which another rank called");
  if (const auto* results = outputs.get_if<value::Tuple>()) {
    int position = 0;
    for (const auto& each : results->items) require_devices(base::str("result ", position++, of), each);
  } else if (const auto* named = outputs.get_if<value::Dict>()) {
    for (const auto& [name, each] : named->items) {
      const auto* text = name.get_if<std::string>();
      require_devices(text == nullptr ? "a result" + of : base::str("result '", *text, "'", of), each);
    }
  }
  require_devices("the result" + of, outputs);
}

}  // namespace lamina::remote
