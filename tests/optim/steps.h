// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "lamina/fused/rules.h"
#include "lamina/optim/fused_functional.h"
#include "lamina/optim/step.h"

namespace lamina::optim {

using GivenHyper = std::vector<std::pair<std::string_view, fused::HyperValue>>;

inline const fused::Rule& rule_named(const std::string& name) {
  return **std::ranges::find(fused::rules(), name, [](const auto* rule) { return rule->declaration.name; });
}

// Ways of updating tensors of the CPU.
inline const std::vector<Way> kWays{Way::kByDevice, Way::kWholeTensors, Way::kWholeTensorsByTheRule};
inline std::string name_of(Way way) {
  return way == Way::kByDevice ? "InMemory" : way == Way::kWholeTensors ? "WholeTensors" : "WholeTensorsByTheRule";
}

// An optimizer of ours with the states of its parameters.
struct Optimizer {
  explicit Optimizer(const std::string& name, const GivenHyper& given = {}, Way way = Way::kByDevice)
      : functional(std::make_shared<FusedFunctional>(rule_named(name), way)),
        hyper(fused::hyper_values(functional->declaration(), given)) {}

  void step(const std::vector<at::Tensor>& parameters, const std::vector<at::Tensor>& gradients) {
    states.resize(parameters.size());
    optim::step(*functional, hyper, parameters, gradients, states, threads);
  }

  std::shared_ptr<const Functional> functional;
  std::vector<double> hyper;
  std::vector<State> states = {};
  Threads threads{2};
};

}  // namespace lamina::optim
