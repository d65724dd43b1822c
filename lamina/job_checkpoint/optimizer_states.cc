// SPDX-License-Identifier: Apache-2.0
#include "lamina/job_checkpoint/optimizer_states.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/scalar_tensor.h>

#include <algorithm>
#include <iterator>
#include <set>
#include <utility>

#include "lamina/base/error.h"
#include "lamina/base/joined.h"
#include "lamina/base/str.h"

namespace lamina::job_checkpoint {
namespace {

using archive::Kind;
using distributed_optimizer::Extent;
using value::Value;

constexpr char kNumberMark = '#';

base::UsageError misfit(const std::string& what) { return base::UsageError(what, base::Code{"checkpoint-optimizers"}); }

// True of what a checkpoint has a place for.
bool has_place(const Value& value) {
  return value.get_if<at::Tensor>() != nullptr || value.get_if<bool>() != nullptr ||
         value.get_if<std::int64_t>() != nullptr || value.get_if<double>() != nullptr ||
         value.get_if<value::None>() != nullptr;
}

// (key, tensor) of a value of a parameter's state; an undefined tensor for what is not to be saved.
std::pair<std::string, at::Tensor> to_tensor(const std::string& parameter, const std::string& key, const Value& value) {
  const auto number = [&](const at::Scalar& held, at::ScalarType type) {
    return std::pair(key + kNumberMark, at::scalar_tensor(held, type));
  };
  if (const auto* tensor = value.get_if<at::Tensor>()) return {key, *tensor};
  if (const auto* flag = value.get_if<bool>()) return number(*flag, at::kBool);
  if (const auto* whole = value.get_if<std::int64_t>()) return number(*whole, at::kLong);
  if (const auto* real = value.get_if<double>()) return number(*real, at::kDouble);
  if (value.get_if<value::None>() != nullptr) return {key + kNumberMark, at::empty({0}, at::kFloat)};
  throw base::UsageError(
      base::str("the state ", key, " that the optimizer has of ", parameter, " is of the kind ", value.kind(),
                ": a checkpoint has tensors and numbers; save the optimizer's state "
                "apart from it"),
      base::Code{"checkpoint-cannot-save"});
}

// The way back.
std::pair<std::string, Value> from_tensor(std::string key, const at::Tensor& saved) {
  if (!key.ends_with(kNumberMark)) return {std::move(key), saved};
  key.pop_back();
  if (saved.numel() == 0) return {std::move(key), Value()};
  if (saved.scalar_type() == at::kBool) return {std::move(key), saved.item<bool>()};
  if (saved.is_floating_point()) return {std::move(key), saved.item<double>()};
  return {std::move(key), saved.item<std::int64_t>()};
}

void check_groups(const std::string& who, OptimizerAccess& here, const OptimizerAbout& saved, bool strict) {
  const auto members = here.engine().groups().members(here.user());
  if (saved.groups.size() != members.size()) {
    throw misfit(base::str(who, " has ", members.size(), " parameter groups here and ", saved.groups.size(),
                           " in the checkpoint"));
  }
  for (std::size_t i = 0; i < members.size(); ++i) {
    const auto group = base::str("group ", i, " of ", who);
    if (const auto lacking = here.lacking(i, saved.groups[i].options); !lacking.empty()) {
      throw misfit(base::str(group, " has no ", base::joined(lacking), " in the checkpoint, which ",
                             here.class_names().front(),
                             " needs: make one of the class that was saved, or leave states out (load_optimizer)"));
    }
    std::set<std::string> mine;
    for (const auto& member : members[i]) mine.insert(member.name);
    const std::set<std::string> theirs(saved.groups[i].parameters.begin(), saved.groups[i].parameters.end());
    if (!strict || mine == theirs) continue;
    std::vector<std::string> other;
    std::ranges::set_symmetric_difference(mine, theirs, std::back_inserter(other));
    throw misfit(base::str(group, " has other parameters than in the checkpoint: ", other.front(),
                           other.size() > 1 ? base::str(" and ", other.size() - 1, " more") : ""));
  }
}

}  // namespace

void for_each_state(int number, OptimizerAccess& optimizer,
                    const std::function<void(const StateName&, const at::Tensor&, const at::Tensor&)>& found,
                    bool skips_others) {
  const auto& locals = optimizer.engine().parameters();
  const auto named = optimizer.engine().states().state(optimizer.user(), Extent::kPart);
  for (const auto& group : optimizer.engine().groups().members(optimizer.user())) {
    for (const auto& [name, given, parameter, local] : group) {
      if (!local.defined()) continue;
      if (locals.is_master(local)) found({number, "", name}, local, local);
      const auto states = named.states.find(name);
      if (states == named.states.end()) continue;
      for (const auto& [key, value] : states->second.as<value::Dict>().items) {
        if (skips_others && !has_place(value)) continue;
        const auto [state, tensor] = to_tensor(name, key.as<std::string>(), value);
        if (tensor.defined()) found({number, state, name}, local, tensor);
      }
    }
  }
}

void add_states(int number, OptimizerAccess& optimizer, SaveList& list) {
  const auto& locals = optimizer.engine().parameters();
  for_each_state(number, optimizer, [&](const StateName& name, const at::Tensor& local, const at::Tensor& value) {
    list.add_state(locals, name, local, value);
  });
}

OptimizerAbout about_of(OptimizerAccess& optimizer) {
  OptimizerAbout about{.class_name = optimizer.class_names().front(), .groups = {}, .rest = optimizer.rest()};
  auto options = optimizer.options();
  for (const auto& group : optimizer.engine().groups().members(optimizer.user())) {
    auto& known = about.groups.emplace_back();
    known.options = std::move(options.at(about.groups.size() - 1));
    for (const auto& member : group) known.parameters.push_back(member.name);
  }
  return about;
}

void check_optimizers(const std::vector<OptimizerAccess*>& here, const std::vector<OptimizerAbout>& saved,
                      bool strict) {
  if (saved.size() != here.size()) {
    throw misfit(base::str("the checkpoint has the states of ", saved.size(), " optimizers, and there are ",
                           here.size(),
                           " here: make them before resume_from_checkpoint(), or leave states out (load_optimizer)"));
  }
  for (std::size_t number = 0; number < here.size(); ++number) {
    const auto who = base::str("optimizer ", number);
    const auto own = here[number]->class_names();
    const auto& theirs = saved[number].class_name;
    if (strict && !theirs.empty() && std::ranges::find(own, theirs) == own.end()) {
      throw misfit(base::str(who, " is of the class ", own.front(), " here and ", theirs,
                             " in the checkpoint: make one of that class, or load without strict, where the states "
                             "are alike, or leave states out (load_optimizer)"));
    }
    check_groups(who, *here[number], saved[number], strict);
  }
}

void want_masters(int number, OptimizerAccess& optimizer, const Parts& parts, Reader& reader) {
  const auto& locals = optimizer.engine().parameters();
  for (const auto& group : optimizer.engine().groups().members(optimizer.user())) {
    for (const auto& [name, given, parameter, local] : group) {
      if (local.defined() && locals.is_master(local)) reader.want_master(parts, {number, "", name}, local);
    }
  }
}

WantedStates::WantedStates(int number, OptimizerAccess& optimizer, const OptimizerAbout& about, const Parts& parts,
                           Reader& reader)
    : optimizer_(&optimizer), about_(&about) {
  std::map<std::string, std::vector<std::string>> keys;
  for (const auto& saved : reader.manifest().tensors) {
    if (saved.kind == Kind::kState && saved.optimizer == number) keys[saved.name].push_back(saved.state);
  }
  const auto& locals = optimizer.engine().parameters();
  const auto held = optimizer.engine().states().state(optimizer.user(), Extent::kPart).states;
  for (const auto& group : optimizer.engine().groups().members(optimizer.user())) {
    for (const auto& [name, given, parameter, local] : group) {
      if (!local.defined()) continue;
      const bool is_owners = optimizer.user().needs() == fused::Needs::kWhole && locals.is_part(local);
      if (is_owners && !locals.updates_whole(local)) continue;
      const auto own = held.find(name);
      for (const auto& key : keys[name]) {
        const auto* now = own == held.end() ? nullptr : at(own->second.as<value::Dict>(), key).get_if<at::Tensor>();
        wanted_.push_back(
            {name, key,
             reader.want_state(parts, locals, {number, key, name}, local, now == nullptr ? at::Tensor() : *now)});
      }
    }
  }
}

void WantedStates::load() {
  std::map<std::string, value::Dict> states;
  for (const auto& [parameter, key, value] : wanted_) {
    auto [name, held] = from_tensor(key, value);
    states[parameter].items.emplace_back(std::move(name), std::move(held));
  }
  optimizer_->load(states, *about_);
}

}  // namespace lamina::job_checkpoint
