// SPDX-License-Identifier: Apache-2.0
#include "lamina/distributed_optimizer/states.h"

#include <c10/core/GradMode.h>

#include <utility>

#include "lamina/faces/sayings.h"
#include "lamina/model/values.h"

namespace lamina::distributed_optimizer {
namespace {

// A state with the master in it, as ranks send each other: under None, for fields may have any name.
value::Value with_master(value::Value state, const at::Tensor& master) {
  if (state.get_if<value::Dict>() == nullptr) state = value::Dict();
  state.as<value::Dict>().items.emplace_back(value::None{}, master);
  return state;
}

at::Tensor take_master(value::Value& state) {
  auto& items = state.as<value::Dict>().items;
  at::Tensor master;
  std::erase_if(items, [&](const auto& item) {
    if (item.first.template get_if<value::None>() == nullptr) return false;
    master = item.second.template as<at::Tensor>();
    return true;
  });
  return master;
}

bool is_empty(const value::Value& state) {
  const auto* fields = state.get_if<value::Dict>();
  return fields == nullptr || fields->items.empty();
}

}  // namespace

States::Here States::here(const UserOptimizer& user) const {
  Here here;
  for (auto& group : groups_.members(user)) {
    for (auto& member : group) {
      if (member.local.defined()) here.push_back(std::move(member));
    }
  }
  return here;
}

NamedState States::state(const UserOptimizer& user, Extent extent) const {
  parameters_.follow();
  NamedState state;
  const auto here = this->here(user);
  for (const auto& member : here) {
    if (auto own = user.state_of(member.local); !is_empty(own)) state.states[member.name] = std::move(own);
    if (parameters_.is_master(member.local)) state.masters[member.name] = member.local.detach();
  }
  if (extent == Extent::kPart) return state;
  const bool have_owners = user.needs() == fused::Needs::kWhole;
  join(here, state, extent != Extent::kSlice, have_owners);
  const auto over = parameters_.divided_over();
  if (have_owners && over) add_others(user, state, parameters_.members(*over), false);
  if (extent == Extent::kSlice) return state;
  if (have_owners && parameters_.have_slices())
    add_others(user, state, parameters_.members(topology::Group::kTp), false);
  if (extent != Extent::kHere) add_others(user, state, ranks_.pipeline(), extent == Extent::kFirst);
  return state;
}

void States::join(const Here& here, NamedState& state, bool joins_slices, bool states_are_whole) const {
  for (const auto& member : here) {
    if (!parameters_.is_part(member.local)) continue;
    const auto whole = [&](const at::Tensor& part) {
      return joins_slices ? parameters_.whole_of(member.local, part) : parameters_.slice_of(member.local, part);
    };
    if (const auto master = state.masters.find(member.name); master != state.masters.end()) {
      master->second = whole(master->second);
    }
    const auto found = state.states.find(member.name);
    if (states_are_whole || found == state.states.end()) continue;
    const auto like = [&](at::IntArrayRef sizes) { return sizes == member.local.sizes(); };
    found->second = of_each_like(found->second, like, whole);
  }
}

void States::add_others(const UserOptimizer& user, NamedState& state, std::span<const base::Rank> ranks,
                        bool to_first) const {
  if (ranks.size() < 2) return;
  for (auto& [name, fields] : state.states) fields = user.travelling(std::move(fields));
  for (const auto& [name, master] : state.masters) state.states[name] = with_master(state.states[name], master);
  std::vector<model::NamedValue> own;
  for (auto& [name, fields] : std::exchange(state.states, {})) own.emplace_back(name, std::move(fields));
  state.masters.clear();
  for (auto& [name, fields] : model::gather(std::move(own), to_first, ranks, ranks_.mailbox, ranks_.patience())) {
    if (auto master = take_master(fields); master.defined()) state.masters[name] = std::move(master);
    if (!is_empty(fields)) state.states[name] = std::move(fields);
  }
}

std::vector<value::Value> States::parts_of(const UserOptimizer& user, const NamedState& state, bool are_parts) const {
  parameters_.follow();
  std::vector<value::Value> parts;
  for (const auto& member : here(user)) {
    auto& part = parts.emplace_back();
    const auto found = state.states.find(member.name);
    if (found == state.states.end()) continue;
    part = are_parts ? found->second : groups_.part_of_state(user, member.local, member.parameter, found->second);
  }
  return parts;
}

NamedState States::gathered(const UserOptimizer& user, NamedState own) const {
  add_others(user, own, ranks_.pipeline(), false);
  return own;
}

// Files of the original have parts, and no word of it.
std::string States::misfit(const UserOptimizer& user, const std::map<std::string, at::Tensor>& masters,
                           bool are_parts) const {
  for (const auto& member : here(user)) {
    const auto found = masters.find(member.name);
    if (found == masters.end() || !parameters_.is_master(member.local)) continue;
    const auto given = found->second.numel(), own = member.local.numel();
    const auto expected = are_parts ? own : layout::numel(parameters_.sizes_of_whole(member.parameter));
    const bool is_slice = given == member.parameter.numel();
    if (given != expected && given != own && !is_slice)
      return faces::said("other-master", member.name, given, expected);
  }
  return "";
}

void States::take_masters(const UserOptimizer& user, const std::map<std::string, at::Tensor>& masters,
                          bool are_parts) const {
  const at::NoGradGuard no_grad;
  for (const auto& member : here(user)) {
    const auto found = masters.find(member.name);
    if (found == masters.end() || !parameters_.is_master(member.local)) continue;
    const auto value = are_parts ? found->second : parameters_.part_of(member.local, found->second);
    member.local.detach().copy_(value.reshape(member.local.sizes()));
  }
}

}  // namespace lamina::distributed_optimizer
