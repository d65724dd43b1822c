// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "lamina/fused/rule.h"
#include "lamina/fused/threads.h"

namespace lamina::optim {

using fused::Declaration;
using fused::Hyper;
using fused::Norms;
using fused::Threads;

// The states of one parameter, tensors and numbers, each in the order of the declaration; empty before its first step.
// A state that the given hyper-parameters do not use, as Adam's maximum without amsgrad, is undefined.
struct State {
  std::vector<at::Tensor> tensors;
  std::vector<double> numbers;
  bool started = false;  // a step has been taken that uses some of them; SGD's without momentum does not
  bool made = false;     // a step has put in some of them, since its holder set this to false
};

// One parameter in a step, or the part of it that is held here. Tensors and state are the caller's, and pointed to: to
// count references of Python's tensors would take as long as all other calls of a step.
struct Update {
  const at::Tensor* parameter = nullptr;  // in float32, where the model's own are half
  const at::Tensor* gradient = nullptr;   // undefined: the parameter is left alone
  State* state = nullptr;                 // what its first step makes is kept there
  at::Tensor copy;  // gets the new values too, in its own type and in the same pass; undefined for none
  Norms norms{};    // from `measure`; combined over the holders, if there are others
  std::optional<std::int64_t> elements{};  // the first of them, where others merely pad what is held here
};

// Values that hold for all parameters of a group.
struct Step {
  Hyper hyper;
  double gradient_scale = 1;  // gradients are multiplied by it first
  double gradient_norm = 0;   // of all gradients of the model so scaled, where the declaration asks for it
};

// Parameters that take a step with the same values.
struct StepOf {
  const Step& step;
  std::span<Update> updates;
};

// An optimizer as a function: hyper-parameters, states, parameters and gradients in, parameters and states updated in
// place. It keeps nothing, knows nothing of autograd, and serves many threads at once, each with parameters of its own.
class Functional {
 public:
  virtual ~Functional() = default;

  // Needs of a parameter and kinds of states: see [Note: needs] in fused/declaration.h.
  virtual const Declaration& declaration() const = 0;

  // Throws UsageError for hyper-parameters that it does not take. `measure` and `update` rely on it.
  virtual void check(Hyper hyper) const = 0;

  // The first of two passes, for optimizers that need norms: sets the norms of the part that is held here. The caller
  // combines them over the holders as the declaration says. It may advance states, so a step that is to be left out for
  // an overflow must not begin it. All groups of a step are measured together, with one wait for their device.
  virtual void measure(std::span<const StepOf> groups, Threads& threads) const = 0;
  void measure(const Step& step, std::span<Update> updates, Threads& threads) const {
    const StepOf alone{step, updates};
    measure({&alone, 1}, threads);
  }

  virtual void update(const Step& step, std::span<Update> updates, Threads& threads) const = 0;
};

}  // namespace lamina::optim
