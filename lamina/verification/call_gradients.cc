// SPDX-License-Identifier: Apache-2.0
#include "lamina/verification/call_gradients.h"

#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <mutex>

namespace lamina::verification {

namespace autograd = torch::autograd;

namespace {

struct Reached {
  std::unordered_set<autograd::Edge> ends;
  std::vector<const at::TensorImpl*> leaves;
};

// Returns those of `ends` that a graph from these edges reaches, and its leaves. It goes no further there.
Reached reached_from(std::vector<autograd::Edge> open, const std::unordered_set<autograd::Edge>& ends) {
  Reached reached;
  std::unordered_set<const autograd::Node*> seen;
  while (!open.empty()) {
    const auto edge = std::move(open.back());
    open.pop_back();
    if (!edge.is_valid()) continue;
    if (ends.contains(edge)) {
      reached.ends.insert(edge);
    } else if (seen.insert(edge.function.get()).second) {
      if (const auto* leaf = dynamic_cast<const autograd::AccumulateGrad*>(edge.function.get())) {
        reached.leaves.push_back(leaf->variable.unsafeGetTensorImpl());
      }
      const auto& next = edge.function->next_edges();
      open.insert(open.end(), next.begin(), next.end());
    }
  }
  return reached;
}

}  // namespace

struct CallGradients::Kept {
  void add(std::int64_t number, const at::Tensor& gradient) {
    if (!gradient.defined()) return;
    const std::lock_guard lock(mutex);
    at::Tensor& sum = gradients[number];
    sum = sum.defined() ? sum.add(gradient.detach()) : gradient.detach();
  }

  std::mutex mutex;
  std::map<std::int64_t, at::Tensor> gradients;
};

CallGradients::CallGradients(std::span<const Named> parameters, std::span<const at::Tensor> given)
    : kept_(std::make_shared<Kept>()) {
  for (const auto& [name, tensor] : parameters) names_.emplace(tensor.unsafeGetTensorImpl(), name);
  leave_out_of(given);
}

void CallGradients::see_outputs(std::span<const at::Tensor> outputs) {
  const std::lock_guard lock(kept_->mutex);
  for (std::int64_t number = 0; std::cmp_less(number, outputs.size()); ++number) {
    const auto& tensor = outputs[number];
    if (!tensor.requires_grad()) continue;
    const auto edge = autograd::impl::gradient_edge(tensor);
    if (tensor.is_leaf()) {  // a parameter, which may get more than what comes by the call
      if (const auto name = names_.find(tensor.unsafeGetTensorImpl()); name != names_.end())
        beside_.insert(name->second);
    } else if (!this->outputs().contains(edge)) {
      outputs_.emplace(number, edge);
      tensor.register_hook([kept = kept_, number](const at::Tensor& gradient) { kept->add(number, gradient); });
    }
  }
}

void CallGradients::see_backward(std::span<const at::Tensor> tensors) {
  const std::lock_guard lock(kept_->mutex);
  if (!outputs_.empty()) reached_.merge(leave_out_of(tensors));
}

std::optional<std::map<std::int64_t, at::Tensor>> CallGradients::gradients(
    std::span<const at::Tensor> made_by_call) const {
  const std::lock_guard lock(kept_->mutex);
  std::map<std::int64_t, at::Tensor> known;
  for (std::int64_t number = 0; std::cmp_less(number, made_by_call.size()); ++number) {
    if (made_by_call[number].defined()) known.emplace(number, made_by_call[number]);
  }
  for (const auto& [number, edge] : outputs_) {
    const auto gradient = kept_->gradients.find(number);
    if (known.contains(number) || gradient == kept_->gradients.end() || !reached_.contains(edge)) continue;
    std::vector<autograd::Edge> others;
    std::ranges::copy_if(reached_, std::back_inserter(others), [&](const auto& other) { return other != edge; });
    if (!reached_from(std::move(others), {edge}).ends.empty()) return std::nullopt;
    known.emplace(number, gradient->second);
  }
  return known;
}

std::set<std::string> CallGradients::used_beside() const {
  const std::lock_guard lock(kept_->mutex);
  return beside_;
}

// Parameters that these come from, other than by the model's call, have gradients that are not its. Returns where they
// come from that.
CallGradients::Edges CallGradients::leave_out_of(std::span<const at::Tensor> tensors) {
  std::vector<autograd::Edge> edges;
  for (const auto& tensor : tensors) {
    if (tensor.defined() && tensor.grad_fn()) edges.push_back(autograd::impl::gradient_edge(tensor));
  }
  auto reached = reached_from(std::move(edges), outputs());
  for (const auto* leaf : reached.leaves) {
    if (const auto name = names_.find(leaf); name != names_.end()) beside_.insert(name->second);
  }
  return std::move(reached.ends);
}

CallGradients::Edges CallGradients::outputs() const {
  Edges edges;
  for (const auto& [number, edge] : outputs_) edges.insert(edge);
  return edges;
}

}  // namespace lamina::verification
