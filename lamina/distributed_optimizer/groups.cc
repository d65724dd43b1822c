// SPDX-License-Identifier: Apache-2.0
#include "lamina/distributed_optimizer/groups.h"

#include <algorithm>
#include <unordered_set>

#include "lamina/base/str.h"
#include "lamina/device/capabilities.h"
#include "lamina/device/rank_device.h"

namespace lamina::distributed_optimizer {
namespace {

bool is_like(const value::Value& value, const std::function<bool(at::IntArrayRef)>& like) {
  const auto* tensor = value.get_if<at::Tensor>();
  return tensor != nullptr && tensor->defined() && tensor->dim() > 0 && like(tensor->sizes());
}

}  // namespace

value::Value of_each_like(const value::Value& state, const std::function<bool(at::IntArrayRef)>& like,
                          const std::function<at::Tensor(const at::Tensor&)>& made) {
  const auto of_each = [&](auto list) -> value::Value {
    for (auto& item : list.items) item = of_each_like(item, like, made);
    return list;
  };
  if (is_like(state, like)) return made(state.as<at::Tensor>());
  if (const auto* list = state.get_if<value::List>()) return of_each(*list);
  if (const auto* tuple = state.get_if<value::Tuple>()) return of_each(*tuple);
  if (state.get_if<value::Dict>() == nullptr) return state;
  auto result = state.as<value::Dict>();
  for (auto& [name, field] : result.items) field = of_each_like(field, like, made);
  return result;
}

std::vector<std::vector<OptimizerGroups::Member>> OptimizerGroups::members(const UserOptimizer& user) const {
  std::unordered_map<const at::TensorImpl*, std::string> names;
  if (parameters_.are_cut()) {
    for (const auto& row : parameters_.table()->all()) names.emplace(row.tensor.unsafeGetTensorImpl(), row.layout.name);
  } else {
    for (const auto& [tensor, name] : user.named_parameters()) names.emplace(tensor.unsafeGetTensorImpl(), name);
  }
  std::vector<std::vector<Member>> all;
  const auto now = user.groups();
  for (std::size_t group = 0; group < now.size(); ++group) {
    auto& own = all.emplace_back();
    const auto add = [&](const at::Tensor& parameter, const std::string& given, const at::Tensor& local) {
      const auto name = names.find(parameter.unsafeGetTensorImpl());
      own.push_back({name != names.end() ? name->second : base::str(group, ":", own.size()), given, parameter, local});
    };
    std::unordered_set<const at::TensorImpl*> here;
    for (const auto& each : now[group]) here.insert(parameter_known(each.tensor).unsafeGetTensorImpl());
    auto next = now[group].begin();
    const auto add_next = [&] {
      add(parameter_known(next->tensor), next->name, next->tensor);
      ++next;
    };
    for (const auto& [parameter, given] : group < made_with_.size() ? made_with_[group] : std::vector<Made>()) {
      if (here.contains(parameter.unsafeGetTensorImpl())) {
        add_next();
      } else if (is_elsewhere(parameter)) {
        add(parameter, given, {});
      }
    }
    while (next != now[group].end()) add_next();
  }
  return all;
}

const at::Tensor& OptimizerGroups::parameter_known(const at::Tensor& local) const {
  const auto known = parameter_of_.find(local.unsafeGetTensorImpl());
  return known == parameter_of_.end() ? local : known->second;
}

bool OptimizerGroups::is_elsewhere(const at::Tensor& parameter) const {
  const auto found = locals_.find(parameter.unsafeGetTensorImpl());
  return found != locals_.end() && !found->second.defined();
}

at::Tensor OptimizerGroups::parameter_of(const at::Tensor& local) const {
  const auto known = parameter_of_.find(local.unsafeGetTensorImpl());
  if (known != parameter_of_.end()) return known->second;
  const auto* sharding = parameters_.sharding();
  const auto shard = sharding == nullptr ? std::nullopt : sharding->find_shard(local);
  return shard ? sharding->named(*shard).parameter : local;
}

bool OptimizerGroups::are_cut(const UserOptimizer& user) const {
  return std::ranges::all_of(user.members(), [this](const at::Tensor& member) {
    return parameter_of_.contains(member.unsafeGetTensorImpl());
  });
}

bool OptimizerGroups::are_whole(const UserOptimizer& user) const {
  if (hold_others_) return false;
  return std::ranges::all_of(members(user), [](const auto& group) {
    return std::ranges::all_of(group, [](const auto& member) { return member.local.defined(); });
  });
}

at::Tensor OptimizerGroups::local_of(const at::Tensor& parameter, const model::ParameterTable& table) {
  if (parameters_.is_beside(parameter, table)) return beside_.are_updated_here() ? parameter : at::Tensor();
  if (!table.is_here(parameter)) return {};
  auto* const sharding = parameters_.sharding();
  const auto number = sharding == nullptr ? std::nullopt : sharding->find(parameter);
  return parameters_.local(number ? sharding->shard(*number) : parameter, table);
}

bool OptimizerGroups::trim(UserOptimizer& user) {
  const auto now = user.groups();
  const auto& table = *parameters_.table();
  std::vector<at::Tensor> beside;
  for (const auto& group : now) {
    for (const auto& [tensor, given] : group) {
      // One that the model had until a program put another one in its place is beside it on the ranks that had it
      // alone.
      const bool is_new = !parameter_of_.contains(tensor.unsafeGetTensorImpl());
      if (is_new && parameters_.is_beside(tensor, table)) beside.push_back(tensor);
    }
  }
  const auto known = beside_.all().size();
  beside_.take(beside);
  made_with_.resize(std::max(made_with_.size(), now.size()));
  std::vector<std::vector<UserOptimizer::Given>> trimmed;
  std::vector<UserOptimizer::Moved> moved;
  std::vector<UserOptimizer::Moved> placed;  // moved, and those of which this rank has a slice
  for (std::size_t i = 0; i < now.size(); ++i) {
    auto& kept = trimmed.emplace_back();
    for (const auto& [tensor, given] : now[i]) {
      if (parameter_of_.contains(tensor.unsafeGetTensorImpl())) {
        kept.push_back({tensor, given});
        continue;
      }
      if (known_.emplace(i, tensor.unsafeGetTensorImpl()).second) made_with_[i].push_back({tensor, given});
      const auto [found, is_new] = locals_.try_emplace(tensor.unsafeGetTensorImpl());
      if (is_new) found->second = local_of(tensor, table);
      const auto& local = found->second;
      if (!local.is_same(tensor)) moved.push_back({tensor, local});
      if (local.defined() && (!local.is_same(tensor) || parameters_.is_part(local))) placed.push_back({tensor, local});
      if (!local.defined()) continue;
      parameter_of_[local.unsafeGetTensorImpl()] = tensor;
      kept.push_back({local, given});
    }
  }
  hold_others_ = parameters_.replaces();
  if (!moved.empty()) user.trim(trimmed, moved);
  if (user.needs() == fused::Needs::kWhole) parameters_.spread_wholes(user.members());
  for (const auto& [parameter, local] : placed) {
    if (const auto state = user.state_of(local); state.get_if<value::Dict>() != nullptr) {
      user.set_state(local, part_of_state(user, local, parameter, state));
    }
  }
  move_states(user);
  return beside_.all().size() > known;
}

void OptimizerGroups::move_states(UserOptimizer& user) {
  if (devices::is_host(devices::rank_device())) return;
  for (const auto& member : user.members()) {
    const auto state = user.state_of(member);
    if (state.get_if<value::Dict>() == nullptr) continue;
    const auto like = [&](at::IntArrayRef of) { return of == member.sizes(); };
    user.set_state(member, of_each_like(state, like, [&](const at::Tensor& of) { return of.to(member.device()); }));
  }
}

value::Value OptimizerGroups::part_of_state(const UserOptimizer& user, const at::Tensor& local,
                                            const at::Tensor& parameter, const value::Value& state) const {
  if (user.needs() == fused::Needs::kWhole && parameters_.is_part(local)) {
    return parameters_.updates_whole(local) ? state : value::Value();
  }
  const auto sizes = parameters_.sizes_of_whole(parameter);
  const auto like = [&](at::IntArrayRef of) { return of == at::IntArrayRef(sizes) || of == parameter.sizes(); };
  return of_each_like(
      state, like, [&](const at::Tensor& whole) { return parameters_.part_of(local, whole).to(local.scalar_type()); });
}

}  // namespace lamina::distributed_optimizer
