// SPDX-License-Identifier: Apache-2.0
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

#include <set>

#include "lamina/frontend/current.h"
#include "lamina/frontend/model.h"
#include "lamina/frontend/serializer.h"
#include "lamina/model/norm.h"
#include "lamina/model/values.h"
#include "lamina/value/released.h"

// Operations on all of a model between steps: the norm of its gradients, and its values.
namespace lamina::frontend {

using topology::Group;

at::Tensor Model::grad_norm(double norm_type, const std::source_location& site) {
  return norm_of_gradients(norm_type, patience(*job_.session, "grad_norm()", site));
}

at::Tensor Model::norm_of_gradients(double norm_type, const base::Patience& patience) {
  auto& session = *job_.session;
  std::vector<model::Measured> gradients;
  for (const auto& held : tree_.parameters()) gradients.emplace_back(held.tensor, held.tensor.grad());
  const auto norms =
      model::norms(table(), gradients, norm_type, session.members(Group::kPp), session.mailbox(), patience);
  return norms.empty() ? at::zeros({}) : at::linalg_vector_norm(at::stack(norms), norm_type);
}

at::Tensor Model::clip_grad_norm(double max_norm, double norm_type, const std::source_location& site) {
  const at::NoGradGuard no_grad;
  const at::Tensor total = norm_of_gradients(norm_type, patience(*job_.session, "clip_grad_norm_()", site));
  const at::Tensor factor = total.add(1e-6).reciprocal().mul(max_norm).clamp_max(1.0);
  for (const auto& [name, parameter] : own(tree_.parameters())) {
    if (parameter.grad().defined()) parameter.grad().mul_(factor);
  }
  return total;
}

std::vector<std::pair<std::string, at::Tensor>> Model::state(const std::source_location& site) {
  auto& session = *job_.session;
  std::vector<std::pair<std::string, at::Tensor>> state = tree_.named();
  if (!job_.pipelined() || !partitioned()) {
    for (auto& [name, tensor] : state) tensor = tensor.detach();
    return state;
  }
  const auto tensors =
      model::gather(table(), session.members(Group::kPp), session.mailbox(), patience(session, "state_dict()", site));
  std::map<const void*, at::Tensor> values;
  for (std::size_t i = 0; i < tensors.size(); ++i) values[table().all()[i].tensor.unsafeGetTensorImpl()] = tensors[i];
  for (auto& [name, tensor] : state) tensor = values.at(tensor.unsafeGetTensorImpl());
  return state;
}

void Model::load(const std::map<std::string, at::Tensor>& state) {
  std::string wrong;
  std::set<std::string> known;
  for (const auto& [name, tensor] : tree_.named()) {
    known.insert(name);
    const auto found = state.find(name);
    if (found == state.end()) {
      wrong += base::str("\n", name, " is missing");
    } else if (found->second.sizes() != tensor.sizes()) {
      wrong += base::str("\n", name, " has the shape ", found->second.sizes(), ", the model's ", tensor.sizes());
    }
  }
  for (const auto& [name, tensor] : state) {
    if (!known.contains(name)) wrong += base::str("\n", name, " is nothing of the model's");
  }
  if (!wrong.empty()) throw base::UsageError("load_state_dict(): the state is not this model's:" + wrong);
  const at::NoGradGuard no_grad;
  for (auto [name, tensor] : tree_.named()) {
    if (!value::is_released(tensor)) tensor.copy_(state.at(name));
  }
}

}  // namespace lamina::frontend
