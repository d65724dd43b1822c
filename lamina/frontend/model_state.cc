// SPDX-License-Identifier: Apache-2.0
#include <ATen/ops/full.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <torch/nn/module.h>

#include <set>

#include "lamina/frontend/current.h"
#include "lamina/frontend/model.h"
#include "lamina/frontend/serializer.h"
#include "lamina/job_checkpoint/resumption.h"
#include "lamina/model/norm.h"
#include "lamina/model/values.h"
#include "lamina/session/slicing.h"
#include "lamina/value/released.h"

// Operations on all of a model between steps: the norm of its gradients, and its values.
namespace lamina::frontend {

at::Tensor Model::grad_norm(double norm_type, const std::source_location& site) {
  complete_gradients("grad_norm()");
  return norm_of_gradients(norm_type, patience(*job_.session, "grad_norm()", site));
}

at::Tensor Model::norm_of_gradients(double norm_type, const base::Patience& patience) {
  auto& session = *job_.session;
  std::vector<model::Measured> gradients;
  for (const auto& held : tree_.parameters()) {
    const auto own = held_here(held.tensor);
    gradients.emplace_back(held.tensor, own.defined() ? own.grad() : at::Tensor());
  }
  if (sharding_) gradients = sharding_->measured(std::move(gradients), norm_type);
  const auto norms =
      model::norms(table(), gradients, norm_type, session.members(topology::kOneCopy), session.mailbox(), patience);
  if (norms.empty()) return at::zeros({});
  const auto scale = job_.loss_scale.lock();
  const double factor = scale == nullptr || norm_type == 0 ? 1 : scale->value();  // order 0 counts
  return at::linalg_vector_norm(at::stack(norms), norm_type).div(factor);
}

at::Tensor Model::clip_grad_norm(double max_norm, double norm_type, const std::source_location& site) {
  const at::NoGradGuard no_grad;
  complete_gradients("clip_grad_norm_()");
  const at::Tensor total = norm_of_gradients(norm_type, patience(*job_.session, "clip_grad_norm_()", site));
  const at::Tensor factor = total.add(1e-6).reciprocal().mul(max_norm).clamp_max(1.0);
  for (const auto& held : tree_.parameters()) {
    const auto own = held_here(held.tensor);
    if (own.defined() && own.grad().defined()) own.grad().mul_(factor);
  }
  return total;
}

at::Tensor Model::held_here(const at::Tensor& parameter) const {
  if (!table().is_here(parameter)) return {};
  const auto number = sharding_ ? sharding_->find(parameter) : std::nullopt;
  return number ? sharding_->shard(*number) : parameter;
}

void Model::zero_grad(bool set_to_none) {
  tree_.root()->zero_grad(set_to_none);
  backwards_.forget_plain();
  if (!sharding_) return;
  for (std::size_t i = 0; i < sharding_->size(); ++i) sharding_->zero_grad(i, set_to_none);
}

// Holds the whole values of all sharded parameters while it lives.
std::shared_ptr<void> Model::whole_values() const {
  if (!sharding_) return nullptr;
  for (std::size_t i = 0; i < sharding_->size(); ++i) sharding_->values()->hold(i);
  return {nullptr, [sharding = sharding_](void*) {
            for (std::size_t i = 0; i < sharding->size(); ++i) sharding->values()->let_go(i);
          }};
}

// Without its history, and in memory that stays.
at::Tensor Model::detached(const at::Tensor& tensor) const {
  const bool shared = sharding_ && sharding_->find(tensor);
  return shared ? tensor.detach().clone() : tensor.detach();
}

std::vector<std::pair<std::string, at::Tensor>> Model::state(const std::source_location& site) {
  job_checkpoint::require_none_waits(job_.waiting.get(), "state_dict()");
  auto& session = *job_.session;
  std::vector<std::pair<std::string, at::Tensor>> state = tree_.named();
  const auto whole = whole_values();
  if (!partitioned() || (!job_.pipelined() && slicings_.empty())) {
    for (auto& [name, tensor] : state) tensor = detached(tensor);
    return state;
  }
  const auto tensors = model::gather(table(), session.members(topology::kPartitions), session.mailbox(),
                                     patience(session, "state_dict()", site));
  std::map<const void*, at::Tensor> values;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const auto& row = table().all()[i];
    const auto& slicing = row.layout.slicing;
    values[row.tensor.unsafeGetTensorImpl()] =
        slicing ? session::whole_of(session, tensors[i], *slicing) : detached(tensors[i]);
  }
  for (auto& [name, tensor] : state) tensor = values.at(tensor.unsafeGetTensorImpl());
  return state;
}

at::IntArrayRef Model::whole_sizes(const at::Tensor& tensor) const {
  const auto* row = partitioned() ? table().find(tensor) : nullptr;
  return row == nullptr ? tensor.sizes() : at::IntArrayRef(row->layout.shape);
}

at::Tensor Model::slice_here(const at::Tensor& tensor, const at::Tensor& whole) const {
  const auto found = slicings_.find(tensor.unsafeGetTensorImpl());
  return found == slicings_.end() ? whole : session::slice_of(*job_.session, whole, found->second);
}

void Model::load(const std::map<std::string, at::Tensor>& state) {
  job_checkpoint::require_none_waits(job_.waiting.get(), "load_state_dict()");
  std::string wrong;
  std::set<std::string> known;
  for (const auto& [name, tensor] : tree_.named()) {
    known.insert(name);
    const auto found = state.find(name);
    if (found == state.end()) {
      wrong += base::str("\n", name, " is missing");
    } else if (const auto shape = whole_sizes(tensor); found->second.sizes() != shape) {
      wrong += base::str("\n", name, " has the shape ", found->second.sizes(), ", the model's ", shape);
    }
  }
  for (const auto& [name, tensor] : state) {
    if (!known.contains(name)) wrong += base::str("\n", name, " is nothing of the model's");
  }
  if (!wrong.empty()) throw base::UsageError("load_state_dict(): the state is not this model's:" + wrong);
  const at::NoGradGuard no_grad;
  if (sharding_) sharding_->before_update();
  for (auto [name, tensor] : tree_.named()) {
    if (const auto number = sharding_ ? sharding_->find(tensor) : std::nullopt) {
      sharding_->write_back(*number, slice_here(tensor, state.at(name)));
    } else if (!value::is_released(tensor)) {
      tensor.copy_(slice_here(tensor, state.at(name)));
    }
  }
  if (sharding_) sharding_->after_update();
}

}  // namespace lamina::frontend
