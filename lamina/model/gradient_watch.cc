// SPDX-License-Identifier: Apache-2.0
#include "lamina/model/gradient_watch.h"

#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/utils/lambda_post_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <unordered_map>
#include <utility>

#include "lamina/value/torch_version.h"

namespace lamina::model {
namespace {

using torch::autograd::impl::try_get_grad_accumulator;
using Accumulator = value::NodePtr<torch::autograd::Node>;

bool may_train(const at::Tensor& parameter) {
  return (parameter.is_floating_point() || parameter.is_complex()) && parameter.is_leaf() && !parameter.is_inference();
}

// True where backwards of graphs that are made now end in this node.
bool is_current(const torch::autograd::Node& node, const at::Tensor& parameter) {
  if (try_get_grad_accumulator(parameter).get() != &node) return false;
  const auto& takes = node.input_metadata(0);
  return takes.dtype() == parameter.dtype() && takes.device() == parameter.device() && takes.is_same_shape(parameter);
}

// The node of a parameter, which from now on tells of its gradients.
Accumulator watched(const at::Tensor& parameter, const std::shared_ptr<const GradientWatch::Hear>& hear) {
  const bool frozen = !parameter.requires_grad();
  parameter.set_requires_grad(true);  // for a node; one that is frozen now may be trained later
  auto node = torch::autograd::impl::grad_accumulator(parameter);
  parameter.set_requires_grad(!frozen);
  // The hook is the node's, which has the parameter.
  const auto* accumulates = static_cast<const torch::autograd::AccumulateGrad*>(node.get());
  const auto notice = [hear = std::weak_ptr(hear), accumulates](const auto& outputs, const auto& /*inputs*/) {
    if (const auto hears = hear.lock()) (*hears)(accumulates->variable);
    return outputs;
  };
  node->add_post_hook(std::make_unique<torch::autograd::utils::LambdaPostHook>(notice));
  return node;
}

}  // namespace

struct GradientWatch::Watched {
  const at::TensorImpl* parameter;
  Accumulator node;
};

GradientWatch::GradientWatch(Hear hear) : hear_(std::make_shared<const Hear>(std::move(hear))) {}
GradientWatch::~GradientWatch() = default;

bool GradientWatch::watch(std::span<const at::Tensor> parameters) {
  const auto as_before = [&] {
    std::size_t at = 0;
    for (const auto& parameter : parameters) {
      if (!may_train(parameter)) continue;
      if (at == all_.size() || all_[at].parameter != parameter.unsafeGetTensorImpl()) return false;
      if (!is_current(*all_[at++].node, parameter)) return false;
    }
    return at == all_.size();
  };
  if (as_before()) return false;
  std::unordered_map<const at::TensorImpl*, Accumulator> known;
  for (auto& [parameter, node] : std::exchange(all_, {})) known.emplace(parameter, std::move(node));
  bool unheard = false;
  for (const auto& parameter : parameters) {
    if (!may_train(parameter)) continue;
    auto& node = known[parameter.unsafeGetTensorImpl()];
    if (!node || !is_current(*node, parameter)) {
      const auto* before = std::exchange(node, {}).get();  // torch makes another one unless a graph has it
      const auto held = try_get_grad_accumulator(parameter);
      node = before != nullptr && held.get() == before ? held : watched(parameter, hear_);
      unheard = unheard || parameter.grad().defined();
    }
    all_.push_back({parameter.unsafeGetTensorImpl(), node});
  }
  return unheard;
}

}  // namespace lamina::model
