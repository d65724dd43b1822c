// SPDX-License-Identifier: Apache-2.0
#include "lamina/parameter_server/owned.h"

#include <algorithm>
#include <set>

#include "lamina/base/str.h"

namespace lamina::parameter_server {
namespace {

using base::Code;
using base::UsageError;

thread_local std::optional<base::Rank> current_asker;  // whose request this thread serves

// Gives the pointer that `get` finds in the one of this number; `what` it is, for the error.
template <class Thing, class Get>
auto found(std::vector<Thing>& things, std::int64_t number, Get get, const char* what, base::Rank rank) {
  if (number >= 0 && std::cmp_less(number, things.size())) {
    if (auto one = get(things[static_cast<std::size_t>(number)])) return one;
  }
  throw UsageError(base::str("rank ", rank, " has no ", what, " ", number), Code{"remote-other-job"});
}

}  // namespace

Owned::MadeFor::MadeFor(base::Rank asker) : before_(std::exchange(current_asker, asker)) {}
Owned::MadeFor::~MadeFor() { current_asker = before_; }

std::vector<RemoteParameter> Owned::add_parameters(const Placed& placed) {
  std::vector<RemoteParameter> all;
  for (const auto& [name, tensor] : placed.parameters) {
    if (!tensor.defined() || !tensor.is_leaf()) {
      throw UsageError(base::str("place() of ", placed.name.empty() ? "a module" : placed.name, ": its parameter \"",
                                 name, "\" is the result of an operation, which nobody can update"));
    }
    auto parameter = parameters_of_.of(tensor);
    auto [known, added] = parameter_numbers_.emplace(parameter.get(), static_cast<std::int64_t>(parameters_.size()));
    if (added) parameters_.push_back(std::move(parameter));
    all.push_back(
        {{rank_, job_, known->second}, name, tensor.sizes().vec(), tensor.scalar_type(), tensor.requires_grad()});
  }
  return all;
}

RemoteModule Owned::place(Placed placed) {
  const std::lock_guard guard(mutex_);
  if (names_.contains(placed.name)) {
    throw UsageError(base::str("place() of a second module by the name \"", placed.name, "\" on rank ", rank_,
                               ": choose another name"));
  }
  RemoteModule module{{rank_, job_, static_cast<std::int64_t>(modules_.size())}, placed.name, add_parameters(placed)};
  Module here;
  if (placed.name.empty()) {
    here.maker = current_asker;
  } else {
    names_[placed.name] = module;
  }
  for (const auto& parameter : module.parameters) here.parameters.push_back(parameter.address.number);
  here.what = std::make_shared<const Placed>(std::move(placed));
  modules_.push_back(std::move(here));
  return module;
}

std::int64_t Owned::add_optimizer(const std::vector<std::int64_t>& parameters, std::shared_ptr<Updater> updater) {
  std::vector<std::shared_ptr<Parameter>> mine;
  for (const auto number : parameters) mine.push_back(parameter(number));
  auto optimizer = std::make_shared<Optimizer>(std::move(mine), std::move(updater));
  const std::lock_guard guard(mutex_);
  optimizers_.push_back({std::move(optimizer), current_asker});
  return static_cast<std::int64_t>(optimizers_.size()) - 1;
}

void Owned::share(Shared what, std::int64_t number) {
  const std::lock_guard guard(mutex_);
  const auto whose = [](auto& one) { return one.what == nullptr ? nullptr : &one.maker; };
  *(what == Shared::kModule ? found(modules_, number, whose, "module", rank_)
                            : found(optimizers_, number, whose, "optimizer", rank_)) = std::nullopt;
}

void Owned::release(base::Rank maker) {
  std::vector<Module> modules;  // which go when the lock is given back
  std::vector<std::shared_ptr<Optimizer>> optimizers;
  std::vector<std::shared_ptr<Parameter>> parameters;
  const std::lock_guard guard(mutex_);
  for (auto& one : optimizers_) {
    if (one.maker == maker) optimizers.push_back(std::exchange(one.what, nullptr));
  }
  for (auto& one : modules_) {
    if (one.maker == maker) modules.push_back(std::exchange(one, {}));
  }
  std::set<std::int64_t> used;
  for (const auto& one : modules_) used.insert(one.parameters.begin(), one.parameters.end());
  for (const auto& module : modules) {
    for (const auto number : module.parameters) {
      if (used.contains(number) || parameters_[number] == nullptr) continue;
      parameter_numbers_.erase(parameters_[number].get());
      parameters.push_back(std::exchange(parameters_[number], nullptr));
    }
  }
}

std::optional<RemoteModule> Owned::find(const std::string& name) {
  const std::lock_guard guard(mutex_);
  const auto found = names_.find(name);
  return found == names_.end() ? std::nullopt : std::optional(found->second);
}

std::shared_ptr<const Placed> Owned::module(std::int64_t number) {
  const std::lock_guard guard(mutex_);
  return found(modules_, number, [](const Module& one) { return one.what; }, "module", rank_);
}

std::shared_ptr<Parameter> Owned::parameter(std::int64_t number) {
  const std::lock_guard guard(mutex_);
  return found(parameters_, number, [](const auto& one) { return one; }, "parameter", rank_);
}

std::shared_ptr<Optimizer> Owned::optimizer(std::int64_t number) {
  const std::lock_guard guard(mutex_);
  return found(optimizers_, number, [](const Made& one) { return one.what; }, "optimizer", rank_);
}

std::size_t Owned::modules() {
  const std::lock_guard guard(mutex_);
  return std::ranges::count_if(modules_, [](const auto& one) { return one.what != nullptr; });
}

std::size_t Owned::optimizers() {
  const std::lock_guard guard(mutex_);
  return std::ranges::count_if(optimizers_, [](const auto& one) { return one.what != nullptr; });
}

}  // namespace lamina::parameter_server
