// SPDX-License-Identifier: Apache-2.0
#include "lamina/frontend/lent_optimizer.h"

#include <ATen/core/grad_mode.h>
#include <c10/util/Type.h>

#include <algorithm>
#include <sstream>
#include <unordered_map>
#include <utility>

#include "lamina/base/error.h"
#include "lamina/base/str.h"
#include "lamina/faces/sayings.h"
#include "lamina/frontend/current.h"
#include "lamina/frontend/model.h"
#include "lamina/value/guarded.h"

namespace lamina::frontend {
LentOptimizer::LentOptimizer(torch::optim::Optimizer& optimizer, fused::Needs needs, ParameterOf parameter_of)
    : optimizer_(optimizer),
      fused_(dynamic_cast<FusedOptimizer*>(&optimizer)),
      needs_(needs),
      parameter_of_(std::move(parameter_of)) {}

std::vector<LentOptimizer::Given> LentOptimizer::named_parameters() const {
  std::vector<Given> all;
  if (!has_current() || current().model == nullptr) return all;
  for (const auto& held : current().model->tree().parameters()) all.push_back({held.tensor, held.name});
  return all;
}

std::vector<std::vector<LentOptimizer::Given>> LentOptimizer::groups() const {
  std::vector<std::vector<Given>> groups;
  for (const auto& group : optimizer_.param_groups()) {
    auto& members = groups.emplace_back();
    for (const auto& member : group.params()) members.push_back({member, ""});
  }
  return groups;
}

std::vector<at::Tensor> LentOptimizer::members() const {
  std::vector<at::Tensor> all;
  for (const auto& group : optimizer_.param_groups()) {
    all.insert(all.end(), group.params().begin(), group.params().end());
  }
  return all;
}

void LentOptimizer::trim(const std::vector<std::vector<Given>>& groups, std::span<const Moved> moved) {
  std::vector<std::vector<at::Tensor>> members;
  for (const auto& group : groups) {
    auto& own = members.emplace_back();
    for (const auto& member : group) own.push_back(member.tensor);
  }
  exchange(members, moved);
}

void LentOptimizer::exchange(const std::vector<std::vector<at::Tensor>>& groups, std::span<const Moved> moved) {
  for (std::size_t i = 0; i < groups.size(); ++i) optimizer_.param_groups()[i].params() = groups[i];
  auto& states = optimizer_.state();
  for (const auto& [from, to] : moved) {
    const auto found = states.find(from.unsafeGetTensorImpl());
    if (found == states.end()) continue;
    auto state = std::move(found->second);
    states.erase(found);
    if (to.defined()) states[to.unsafeGetTensorImpl()] = std::move(state);
  }
}

value::Value LentOptimizer::state_of(const at::Tensor& member) const {
  const auto found = optimizer_.state().find(member.unsafeGetTensorImpl());
  if (found == optimizer_.state().end() || found->second == nullptr) return {};
  return state_value(fields_of(*found->second));
}

void LentOptimizer::set_state(const at::Tensor& member, value::Value state) {
  auto& states = optimizer_.state();
  const auto found = states.find(member.unsafeGetTensorImpl());
  base::internal_check(found != states.end(), "a state of what has one");
  if (state.get_if<value::Dict>() == nullptr) {
    states.erase(found);
  } else {
    give(*found->second, to_fields(state));
  }
}

// See [Note: options] in distributed_optimizer/options.h.
std::string LentOptimizer::options(bool counts) const {
  const auto& groups = optimizer_.param_groups();
  auto text = base::str("the class = ", class_name(optimizer_), "\nthe number of groups = ", groups.size(), "\n",
                        faces::said("loads", loads_));
  for (std::size_t i = 0; i < groups.size(); ++i) {
    for (const auto& [name, value] : options_of(groups[i])) {
      std::ostringstream word;
      word.precision(12);  // machines may round the last digits of a schedule differently
      value.isDouble() ? word << value.toDouble() : word << value;
      text += base::str("\n", name, " of group ", i, " = ", word.str());
    }
  }
  return counts ? text + names() : text;
}

const std::string& LentOptimizer::names() const {
  const auto& groups = optimizer_.param_groups();
  const auto are_same = [](const at::Tensor& one, const at::Tensor& other) { return one.is_same(other); };
  const auto is_named = [&](const std::vector<at::Tensor>& named, const torch::optim::OptimizerParamGroup& group) {
    return std::ranges::equal(named, group.params(), are_same);
  };
  if (!names_.empty() && std::ranges::equal(named_, groups, is_named)) return names_;
  std::unordered_map<const at::TensorImpl*, std::string> known;
  for (const auto& [tensor, name] : named_parameters()) known.emplace(tensor.unsafeGetTensorImpl(), name);
  named_.clear();
  names_.clear();
  for (std::size_t i = 0; i < groups.size(); ++i) {
    const auto& members = named_.emplace_back(groups[i].params());
    names_ += base::str("\nthe number of parameters of group ", i, " = ", members.size());
    for (std::size_t k = 0; k < members.size(); ++k) {
      const auto name = known.find(parameter_of_(members[k]).unsafeGetTensorImpl());
      names_ += base::str("\nparameter ", k, " of group ", i, " = ",
                          name == known.end() ? "none of the model's" : name->second);
    }
  }
  return names_;
}

bool LentOptimizer::needs_norm() const { return fused_ != nullptr && fused_->functional().declaration().gradient_norm; }

void LentOptimizer::update(const distributed_optimizer::UpdateTerms& terms) {
  const value::Updating updating;
  if (terms.closure) {
    loss_ = optimizer_.step([&] { return terms.closure(), loss_; });
  } else if (fused_ == nullptr || terms.parameters == nullptr) {
    optimizer_.step();
  } else {
    fused_->step_in({.factor = terms.factor, .norm = terms.norm, .parameters = terms.parameters});
  }
}

distributed_optimizer::Closure LentOptimizer::closed(torch::optim::Optimizer::LossClosure closure) {
  if (!closure) return {};
  return [this, closure = std::move(closure)] {
    const at::AutoGradMode records(true);
    loss_ = closure();
  };
}

std::vector<Fields> LentOptimizer::options_of_groups() const {
  std::vector<Fields> all;
  for (auto& group : frontend::state_of(optimizer_).groups) all.push_back(std::move(group.options));
  return all;
}

void LentOptimizer::load(const std::vector<value::Value>& states, const std::vector<Fields>& options) {
  OptimizerState own;
  std::int64_t number = 0;
  for (std::size_t i = 0; i < options.size(); ++i) {
    auto& group = own.groups.emplace_back();
    group.options = options[i];
    for (std::size_t k = 0; k < optimizer_.param_groups()[i].params().size(); ++k, ++number) {
      group.parameters.push_back(number);
      const auto& state = states.at(static_cast<std::size_t>(number));
      if (state.get_if<value::Dict>() != nullptr) own.states[number] = to_fields(state);
    }
  }
  give(optimizer_, own);
  ++loads_;
}

void LentOptimizer::add_param_group(const torch::optim::OptimizerParamGroup& group) {
  fused_ != nullptr ? fused_->add_param_group(group) : optimizer_.add_param_group(group);
}

std::string class_name(const torch::optim::Optimizer& optimizer) {
  if (const auto* fused = dynamic_cast<const FusedOptimizer*>(&optimizer)) {
    return fused->functional().declaration().name;
  }
  const auto name = c10::demangle(typeid(optimizer).name());
  const std::string torchs = "torch::optim::";
  return name.starts_with(torchs) ? name.substr(torchs.size()) : name;
}

}  // namespace lamina::frontend
