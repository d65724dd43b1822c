// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <unordered_map>
#include <vector>

#include "lamina/frontend/calls.h"
#include "lamina/frontend/module_tree.h"
#include "lamina/model/cut.h"
#include "lamina/session/session.h"

namespace lamina::frontend {

std::vector<at::Tensor> tensors_in(const value::Value& tree);

// torch::nn modules as the engine calls them: by number, in training or evaluation as the caller's are.
class TorchModules : public model::Modules {
 public:
  explicit TorchModules(const TorchModuleTree& tree);

  std::string name(base::ModuleId id) const override;
  bool starts_rng_stream(base::ModuleId id) const override { return streams_.at(id.value); }
  bool dynamic(base::ModuleId id) const override { return dynamic_.at(id.value); }
  const torch::nn::Module* module(base::ModuleId id) const { return roots_.at(id.value).get(); }
  // Training flags of it and each module under it, one letter when all are alike; then, for predictions alone, which
  // parameters require gradients.
  model::CallerState capture_state(base::ModuleId id) override;
  value::Value call(base::ModuleId id, const std::string& state, value::Value arguments) override;

 private:
  void apply(base::ModuleId id, const std::string& state);

  std::vector<std::string> names_;
  std::vector<std::shared_ptr<torch::nn::Module>> roots_;
  // For each module: it and all under it, parents first; and their parameters.
  std::vector<std::vector<std::shared_ptr<torch::nn::Module>>> parts_;
  std::vector<std::vector<at::Tensor>> parameters_;
  std::vector<bool> streams_, dynamic_;
};

// The calls of a model that is cut.
class Routing : public Router {
 public:
  Routing(const TorchModuleTree& tree, const model::Cut& cut, session::Session& session);

  std::optional<ModulePlace> find(const torch::nn::Module* module) override;
  value::Value call(base::ModuleId id, std::int64_t kind, value::Value arguments) override;
  std::unique_ptr<Scope> enter(base::ModuleId id) override;

 private:
  session::Session& session_;
  std::shared_ptr<const TorchModules> modules_;
  std::unordered_map<const torch::nn::Module*, ModulePlace> places_;  // elsewhere, or in a stream of its own
};

}  // namespace lamina::frontend
