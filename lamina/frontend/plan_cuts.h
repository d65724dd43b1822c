// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "lamina/frontend/slices.h"
#include "lamina/layout/parameter_layout.h"
#include "lamina/tensor_parallel/plans.h"

namespace torch::nn {
class EmbeddingImpl;
class LinearImpl;
class Module;
}  // namespace torch::nn

namespace lamina::frontend {

struct Forward;

// The cuts of a model's layers by plans of the program, see set_tensor_parallelism().
class PlanCuts {
 public:
  // Changes nothing. Parameters that are slices `now` count as their wholes. Throws base::UsageError where a plan does
  // not fit the model.
  PlanCuts(const torch::nn::Module& root, const Member& member, const Slicings& now);
  PlanCuts(const PlanCuts&) = delete;

  bool empty() const { return cuts_.layers.empty(); }
  // How a parameter of a module is cut; nothing where a plan leaves it whole.
  std::optional<layout::Slicing> slicing(const torch::nn::Module& module, const std::string& parameter) const;
  // The classes of layers under plans that stay whole; `sliced`: names of others, cut by themselves.
  std::vector<std::string> whole(std::set<std::string> sliced) const;
  // From now on parameters are slices, and layers compute with these.
  void begin();
  // Layers compute as before that.
  void end();

 private:
  torch::nn::Module& layer(const tensor_parallel::LayerCut& cut) const;
  std::optional<tensor_parallel::SlicePart> heads_of(const tensor_parallel::LayerCut& cut) const;
  void begin(const tensor_parallel::LayerCut& cut);
  void begin_embedding(const tensor_parallel::LayerCut& cut, torch::nn::EmbeddingImpl& layer);
  void begin_linear(const tensor_parallel::LayerCut& cut, torch::nn::LinearImpl& layer);
  void replace(const torch::nn::Module& layer, Forward forward);
  template <class Value>
  void set(Value& place, const Value& value);

  const std::string team_;
  tensor_parallel::ModelModules model_;
  std::vector<std::shared_ptr<torch::nn::Module>> modules_;  // by the numbers of rows
  tensor_parallel::PlannedLayers planned_;
  tensor_parallel::LayerCuts cuts_;
  std::map<std::string, const tensor_parallel::PlannedLayer*> rows_;  // by name
  std::map<const torch::nn::Module*, const tensor_parallel::LayerCut*> by_layer_;
  std::vector<std::function<void()>> undo_;
};

}  // namespace lamina::frontend
