// SPDX-License-Identifier: Apache-2.0
#include "lamina/optim/step.h"

#include <ATen/Parallel.h>
#include <c10/core/GradMode.h>

#include <cmath>
#include <mutex>

#include "lamina/base/error.h"
#include "lamina/base/str.h"
#include "lamina/faces/sayings.h"
#include "lamina/fused/rules.h"
#include "lamina/optim/fused_functional.h"
#include "lamina/optim/update_tensors.h"

namespace lamina::optim {
namespace {

void check_updates(const Declaration& declaration, std::span<const Update> updates) {
  for (const Update& update : updates) {
    if (update.gradient->defined()) check_update(declaration, update);
  }
}

}  // namespace

std::vector<double> squared_norms(std::span<const at::Tensor> tensors, Threads& threads) {
  const at::NoGradGuard no_grad;
  std::vector<double> squares(tensors.size());
  std::vector<State> none(tensors.size());
  std::vector<at::Tensor> dense(tensors.size());
  std::vector<Update> measured;
  std::vector<std::size_t> places;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    if (!tensors[i].defined()) continue;
    dense[i] = tensors[i].is_sparse() ? tensors[i].coalesce().values() : tensors[i];
    measured.push_back({.parameter = &dense[i], .gradient = &dense[i], .state = &none[i]});
    places.push_back(i);
  }
  FusedFunctional(fused::kGradientNorm).measure({}, measured, threads);
  for (std::size_t i = 0; i < places.size(); ++i) squares[places[i]] = measured[i].norms[0];
  return squares;
}

std::shared_ptr<Threads> shared_threads() {
  static auto& mutex = *new std::mutex();  // threads may take a step until the process ends
  static auto& shared = *new std::shared_ptr<Threads>();
  const std::lock_guard guard(mutex);
  if (!shared || shared->count() != at::get_num_threads()) shared = std::make_shared<Threads>(at::get_num_threads());
  return shared;
}

double squared_gradient_norm(std::span<const std::span<Update>> groups, double gradient_scale, Threads& threads) {
  std::size_t size = 0;
  for (const auto& group : groups) size += group.size();
  std::vector<State> none(size);
  std::vector<Update> measured;
  for (const auto& group : groups) {
    for (const Update& update : group) {
      measured.push_back({.parameter = update.gradient,
                          .gradient = update.gradient,
                          .state = &none[measured.size()],
                          .elements = update.elements});
    }
  }
  FusedFunctional(fused::kGradientNorm).measure({{}, gradient_scale}, measured, threads);
  double sum = 0;
  auto next = measured.begin();
  for (const auto& group : groups) {
    double of_group = 0;
    for (std::size_t i = 0; i < group.size(); ++i) of_group += (next++)->norms[0];
    sum += of_group;
  }
  return sum;
}

double squared_gradient_norm(std::span<Update> updates, double gradient_scale, Threads& threads) {
  return squared_gradient_norm({&updates, 1}, gradient_scale, threads);
}

void step_groups(const Functional& functional, std::span<GroupStep> groups, Threads& threads,
                 const std::function<void()>& measured) {
  if (groups.size() > 1) {  // before any is changed; one alone is checked in its pass
    for (const auto& group : groups) check_updates(functional.declaration(), group.updates);
  }
  std::vector<StepOf> all;
  for (auto& [given, updates] : groups) all.push_back({given, updates});
  functional.measure(all, threads);
  if (measured) measured();
  for (auto& group : groups) functional.update(group.step, group.updates, threads);
}

void step(const Functional& functional, Hyper hyper, std::span<const at::Tensor> parameters,
          std::span<const at::Tensor> gradients, std::span<State> states, Threads& threads) {
  if (parameters.size() != gradients.size()) {
    throw base::UsageError(faces::said("as-many-gradients", parameters.size(), gradients.size()));
  }
  base::internal_check(parameters.size() == states.size(), "a state for each parameter");
  functional.check(hyper);
  std::vector<Update> updates;
  updates.reserve(parameters.size());
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    updates.push_back({.parameter = &parameters[i], .gradient = &gradients[i], .state = &states[i]});
  }
  Step given{.hyper = hyper};
  if (functional.declaration().gradient_norm) {
    check_updates(functional.declaration(), updates);
    given.gradient_norm = std::sqrt(squared_gradient_norm(updates, 1, threads));
  }
  functional.measure(given, updates, threads);
  functional.update(given, updates, threads);
}

}  // namespace lamina::optim
