// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "lamina/optim/functional.h"
#include "lamina/parameter_server/parameter.h"
#include "lamina/value/value.h"

namespace lamina::parameter_server {

// Options that come with one step.
struct StepOptions {
  std::optional<double> norm;  // of all gradients, where the rule asks for it and some lie on other ranks
  value::Value hyper;          // in the place of those that the rule was made with; None: those
};

// The rule of an optimizer, with its states of some parameters.
class Updater {
 public:
  virtual ~Updater() = default;

  // Says that the parameters of a step may be updated in several calls.
  virtual bool divides() const { return false; }

  // Throws base::UsageError for a gradient that the rule cannot apply, before any parameter of the step is updated.
  virtual void check(std::span<const at::Tensor> /*parameters*/, std::span<const at::Tensor> /*gradients*/) const {}

  // Updates the parameters with these indices, all of which have a gradient; the lists are in the order of the
  // parameters that it was made for. From several threads at once, each with parameters that it alone has. Throws
  // base::UsageError for hyper-parameters that the rule does not take.
  using Indices = std::span<const std::size_t>;
  virtual void update(Indices indices, std::span<const at::Tensor> parameters, std::span<const at::Tensor> gradients,
                      const StepOptions& options) = 0;
};

// One of the engine's, without the GIL, whose hyper-parameters are a list of numbers. Throws base::UsageError for
// hyper-parameters that it does not take.
std::shared_ptr<Updater> make_functional_updater(std::shared_ptr<const optim::Functional> functional,
                                                 std::vector<double> hyper, std::size_t parameters,
                                                 std::shared_ptr<optim::Threads> threads);

// An optimizer of parameters that lie here. Several threads may step at once: different parameters are updated at the
// same time, the same one by one after the other.
class Optimizer {
 public:
  Optimizer(std::vector<std::shared_ptr<Parameter>> parameters, std::shared_ptr<Updater> updater);

  // The parameters themselves, in their order.
  const std::vector<at::Tensor>& tensors() const { return tensors_; }

  // Updates those whose gradient is defined, each once. Where the rule divides, a step holds some parameters at a time,
  // so that another one of the same parameters follows it closely.
  void step(const std::vector<at::Tensor>& gradients, const StepOptions& options = {});

 private:
  const std::vector<std::shared_ptr<Parameter>> parameters_;
  const std::shared_ptr<Updater> updater_;
  std::vector<at::Tensor> tensors_;
  std::vector<std::size_t> order_;  // in which their mutexes are taken, alike in all optimizers
};

}  // namespace lamina::parameter_server
