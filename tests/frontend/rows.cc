// SPDX-License-Identifier: Apache-2.0
// Prints what the C++ face makes of a model for a plan, as tests/python/test_both_faces.py compares it with Python's.
#include <cstdio>
#include <nlohmann/json.hpp>

#include "lamina/frontend/tracer.h"
#include "tests/frontend/models.h"

namespace lamina::frontend::test {
namespace {

// Its list is called before what is declared before it, its head is its embedding, and its inner modules are called.
struct TwinImpl : torch::nn::Module {
  Child<torch::nn::LayerNorm> norm;
  Child<torch::nn::Embedding> embedding;
  ChildList<Layer> layers;
  Child<Sequential> tail;
  TwinImpl() {
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth})));
    embedding = register_module("embedding", torch::nn::Embedding(5, kWidth));
    register_module("layers", layers);
    for (int i = 0; i < 4; ++i) layers->push_back(Layer());
    tail = register_module("tail", Sequential(torch::nn::Linear(kWidth, 2 * kWidth), torch::nn::ReLU(),
                                              torch::nn::Linear(2 * kWidth, kWidth)));
  }
  Tensor forward(const Tensor& words) {
    auto x = embedding(words);
    for (auto& layer : *layers) x = layer(x);
    return torch::linear(norm(tail(x)), embedding->weight);
  }
};

nlohmann::json rows(bool traced) {
  const TorchModuleTree tree(std::make_shared<TwinImpl>(), false);
  model::Costs costs;
  const auto words = torch::zeros({2, 3}, torch::kLong);
  if (traced) costs = trace(tree, {CallKind<TwinImpl, Tensor>::number, value::Tuple{{words}}});
  auto found = nlohmann::json::array();
  for (const auto& row : model::plan_rows(tree, costs).first) {
    found.push_back({{"name", row.name},
                     {"parent", row.parent},
                     {"parameter_bytes", row.parameter_bytes},
                     {"parameter_ids", row.parameter_ids},
                     {"output_bytes", row.output_bytes},
                     {"together", row.together}});
  }
  return found;
}

}  // namespace
}  // namespace lamina::frontend::test

int main() {
  using lamina::frontend::test::rows;
  std::puts(nlohmann::json{{"traced", rows(true)}, {"plain", rows(false)}}.dump().c_str());
}
