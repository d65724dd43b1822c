// SPDX-License-Identifier: Apache-2.0
#include "lamina/optim/step.h"

#include <cmath>

#include "lamina/base/error.h"
#include "lamina/base/str.h"
#include "lamina/fused/rules.h"
#include "lamina/optim/fused_functional.h"

namespace lamina::optim {

double squared_gradient_norm(std::span<Update> updates, double gradient_scale, Threads& threads) {
  std::vector<State> none(updates.size());
  std::vector<Update> measured;
  for (std::size_t i = 0; i < updates.size(); ++i) {
    measured.push_back({.parameter = updates[i].gradient, .gradient = updates[i].gradient, .state = &none[i]});
  }
  FusedFunctional(fused::kGradientNorm).measure({{}, gradient_scale}, measured, threads);
  double sum = 0;
  for (const Update& update : measured) sum += update.norms[0];
  return sum;
}

void step(const Functional& functional, Hyper hyper, std::span<const at::Tensor> parameters,
          std::span<const at::Tensor> gradients, std::span<State> states, Threads& threads) {
  if (parameters.size() != gradients.size()) {
    throw base::UsageError(
        base::str("the gradients passed in does not equal to the size of the parameters! Params "
                  "length: ",
                  parameters.size(), ". Gradients length: ", gradients.size()));
  }
  base::internal_check(parameters.size() == states.size(), "a state for each parameter");
  functional.check(hyper);
  std::vector<Update> updates;
  updates.reserve(parameters.size());
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    updates.push_back({.parameter = parameters[i], .gradient = gradients[i], .state = &states[i]});
  }
  Step given{.hyper = hyper};
  if (functional.declaration().gradient_norm) {
    given.gradient_norm = std::sqrt(squared_gradient_norm(updates, 1, threads));
  }
  functional.measure(given, updates, threads);
  functional.update(given, updates, threads);
}

}  // namespace lamina::optim
