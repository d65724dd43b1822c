// SPDX-License-Identifier: Apache-2.0
#include "lamina/frontend/routing.h"

#include <c10/util/Type.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <array>
#include <map>
#include <set>

#include "lamina/frontend/batch_norms.h"
#include "lamina/remote/anywhere.h"
#include "lamina/runtime/rng_streams.h"

namespace lamina::frontend {
namespace {

constexpr char kEndOfTraining = '|';

// [Note: drawing modules] Which modules run in a random stream of their own: those that may draw random numbers, and
// those above them. Only of torch's own classes is it known which do not, so the rule looks at names of classes: it is
// then the same in every layout.
bool may_draw(const torch::nn::Module& module) {
  const std::string type = c10::demangle(typeid(module).name());
  if (!type.starts_with("torch::nn::")) return true;
  constexpr std::array kDraw = {"Dropout", "RReLU", "FractionalMaxPool", "RNN",
                                "LSTM",    "GRU",   "Transformer",       "MultiheadAttention"};
  return std::ranges::any_of(kDraw, [&](const char* word) { return type.find(word) != std::string::npos; });
}

bool varies(const torch::nn::Module& module) {
  const RegisteredChild* known = find_child(&module);
  return known != nullptr && known->dynamic;
}

struct InStream : Router::Scope {
  std::optional<runtime::RngStream> stream = runtime::rng_stream_here();
};

// Modules of several parents that keep running statistics: their calls are waited for, so that they see them in the
// order of the program.
std::set<const torch::nn::Module*> shared_norms(const torch::nn::Module& root) {
  std::map<const torch::nn::Module*, int> parents;
  for (const auto& module : root.modules()) {
    for (const auto& child : module->children()) ++parents[child.get()];
  }
  std::set<const torch::nn::Module*> shared;
  for (const auto& [module, count] : parents) {
    if (count > 1 && !batch_norms(*module).empty()) shared.insert(module);
  }
  return shared;
}

}  // namespace

TorchModules::TorchModules(const ModuleTree& tree) {
  const auto shared = shared_norms(*tree.nodes().front().module);
  for (const auto& node : tree.nodes()) {
    names_.push_back(node.name.empty() ? "the model" : node.name);
    roots_.push_back(node.module);
    parts_.push_back(node.module->modules());
    parameters_.push_back(node.module->parameters());
    streams_.push_back(std::ranges::any_of(parts_.back(), [](const auto& part) { return may_draw(*part); }));
    dynamic_.push_back(std::ranges::any_of(
        parts_.back(), [&](const auto& part) { return varies(*part) || shared.contains(part.get()); }));
  }
}

std::string TorchModules::name(base::ModuleId id) const { return names_.at(id.value); }

std::string TorchModules::capture_state(base::ModuleId id) {
  std::string training;
  for (const auto& part : parts_.at(id.value)) training += part->is_training() ? 't' : 'e';
  if (training.find_first_not_of(training[0]) == std::string::npos) training.resize(1);
  training += kEndOfTraining;
  for (const auto& parameter : parameters_.at(id.value)) training += parameter.requires_grad() ? '1' : '0';
  return training;
}

value::Value TorchModules::call(base::ModuleId id, const std::string& state, value::Value arguments) {
  apply(id, state);
  auto& parts = arguments.as<value::Tuple>().items;
  const auto invoke = call_kind(parts.at(0).as<std::int64_t>());
  auto given = std::move(parts.at(1));
  return invoke(*roots_.at(id.value), std::move(given));
}

void TorchModules::apply(base::ModuleId id, const std::string& state) {
  const auto& parts = parts_.at(id.value);
  const auto count = state.find(kEndOfTraining);
  for (std::size_t i = 0; i < parts.size(); ++i) {
    const bool training = state.at(count == 1 ? 0 : i) == 't';
    if (parts[i]->is_training() != training) parts[i]->train(training);  // and all under it, which come next
  }
}

Routing::Routing(const ModuleTree& tree, const std::vector<int>& owners, const std::vector<bool>& anywhere,
                 session::Session& session)
    : session_(session) {
  const auto modules = std::make_shared<TorchModules>(tree);
  modules_ = modules;
  std::vector<base::Rank> ranks;
  for (int node = 0; node < tree.size(); ++node) {
    const base::ModuleId id(node);
    const base::Partition owner(owners[node]);
    ranks.push_back(anywhere[node] ? remote::kAnywhere : session.owner(owner));
    const bool elsewhere = !anywhere[node] && owner != session.partition();
    if (!elsewhere && !anywhere[node] && !modules->starts_rng_stream(id)) continue;
    places_[tree.nodes()[node].module.get()] = {this, id, elsewhere, anywhere[node]};
  }
  session.job().set_model(modules, std::move(ranks));
}

std::optional<Place> Routing::find(const torch::nn::Module* module) {
  const auto found = places_.find(module);
  if (found == places_.end()) return std::nullopt;
  return found->second;
}

value::Value Routing::call(base::ModuleId id, std::int64_t kind, value::Value arguments) {
  return session_.job().call(id, value::Tuple{{kind, std::move(arguments)}});
}

std::unique_ptr<Router::Scope> Routing::enter(base::ModuleId id) {
  return modules_->starts_rng_stream(id) ? std::make_unique<InStream>() : nullptr;
}

}  // namespace lamina::frontend
