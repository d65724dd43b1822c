// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "lamina/optim/functional.h"

namespace lamina::optim {

// Sums of squares: of the elements of each tensor, 0 for an undefined one. In float64, and the same bits with any
// number of threads. Waits for other devices than the CPU once.
std::vector<double> squared_norms(std::span<const at::Tensor> tensors, Threads& threads);

// The process's threads for updates, kept until it ends. There are as many as torch would use, which a program may
// change.
std::shared_ptr<Threads> shared_threads();

// The sum of the squares of all gradients, each multiplied by the scale. The same bits with any number of threads.
// Waits for other devices than the CPU once.
double squared_gradient_norm(std::span<const std::span<Update>> groups, double gradient_scale, Threads& threads);
double squared_gradient_norm(std::span<Update> updates, double gradient_scale, Threads& threads);

// A group of parameters in a step; they are checked, as torch's are, where groups are made.
struct GroupStep {
  Step step;
  std::vector<Update> updates;
};

// One step of an optimizer's groups: measures all, then updates. `measured` is called in between, to combine norms with
// other ranks that hold parts of the same parameters.
void step_groups(const Functional& functional, std::span<GroupStep> groups, Threads& threads,
                 const std::function<void()>& measured = {});

// A step of parameters that are whole and lie all here: checks hyper-parameters, measures, updates. `gradients` and
// `states` stand in the order of `parameters`. Throws UsageError, before anything is changed.
void step(const Functional& functional, Hyper hyper, std::span<const at::Tensor> parameters,
          std::span<const at::Tensor> gradients, std::span<State> states, Threads& threads);

}  // namespace lamina::optim
