// SPDX-License-Identifier: Apache-2.0
#include "lamina/optim/torch_updates.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_fused_adagrad.h>
#include <ATen/ops/_fused_adam.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/_fused_sgd.h>
#include <ATen/ops/full.h>

#include <map>
#include <string_view>

#include "lamina/fused/rules.h"

namespace lamina::optim {
namespace {

// A device has it, rather than somebody in its place.
bool has(const char* operation, const at::Tensor& like) {
  const auto found = c10::Dispatcher::singleton().findSchema({operation, ""});
  return found &&
         found->hasKernelForDispatchKey(c10::computeDispatchKey(like.scalar_type(), c10::kStrided, like.device()));
}

// Counts of steps, this one included, where the parameters are.
std::vector<at::Tensor> counted(const TorchBatch& batch) {
  std::map<double, at::Tensor> known;
  std::vector<at::Tensor> all;
  for (const double before : batch.steps) {
    auto& count = known[before];
    if (!count.defined()) count = at::full({}, before + 1, batch.parameters.front().options().dtype(at::kFloat));
    all.push_back(count);
  }
  return all;
}

}  // namespace

std::function<void(const TorchBatch&)> torch_update(const fused::Rule& rule, fused::Hyper hyper,
                                                    const at::Tensor& like) {
  const auto get = [&rule, hyper](std::string_view name) { return hyper[fused::hyper_index(rule.declaration, name)]; };
  if (&rule == &fused::kSgd && has("aten::_fused_sgd_", like)) {
    return [get](const TorchBatch& b) {
      at::_fused_sgd_(b.parameters, b.gradients, b.states[0], get("weight_decay"), get("momentum"), get("lr"),
                      get("dampening"), get("nesterov") != 0, get("maximize") != 0, b.first);
    };
  }
  if ((&rule == &fused::kAdam || &rule == &fused::kAdamW) && get("bias_correction") != 0) {
    const bool decoupled = get("decoupled_weight_decay") != 0;
    if (!has(decoupled ? "aten::_fused_adamw_" : "aten::_fused_adam_", like)) return {};
    return [get, decoupled](const TorchBatch& b) {
      const auto update = [&](const auto& adam) {
        adam(b.parameters, b.gradients, b.states[0], b.states[1], b.states[2], counted(b), get("lr"), get("beta1"),
             get("beta2"), get("weight_decay"), get("eps"), get("amsgrad") != 0, get("maximize") != 0);
      };
      if (decoupled) {
        update([](const auto&... all) { at::_fused_adamw_(all...); });
      } else {
        update([](const auto&... all) { at::_fused_adam_(all...); });
      }
    };
  }
  if (&rule == &fused::kAdagrad && has("aten::_fused_adagrad_", like)) {
    return [get](const TorchBatch& b) {
      at::_fused_adagrad_(b.parameters, b.gradients, b.states[0], counted(b), get("lr"), get("lr_decay"),
                          get("weight_decay"), get("eps"), get("maximize") != 0);
    };
  }
  return {};
}

}  // namespace lamina::optim
