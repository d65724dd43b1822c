// SPDX-License-Identifier: Apache-2.0
// A step of an optimizer in one thread, beside torch's fused kernel, where it has one, and beside loops that merely
// read and write the memory of the passes:
//
//     optim_bench OPTIMIZER ROUNDS SIZE...
//
// Prints the median seconds of each, in float32, of steps one after the other, which find in the caches what fits
// there; 0 for what torch does not have.
#include <ATen/Parallel.h>
#include <ATen/ops/_fused_adam.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/_fused_sgd.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string_view>

#include "lamina/fused/kernel.h"
#include "lamina/optim/fused_functional.h"
#include "lamina/optim/registry.h"

namespace {

using namespace lamina;
using fused::Coefficients;
using fused::Combine;

// Reads parameter, gradient and states, and writes all but the gradient.
template <std::size_t States>
struct Touch {
  template <class T>
  struct Step {
    static constexpr std::size_t kStates = States;
    T factor;

    void operator()(T& parameter, T gradient, std::array<T, States>& states) const {
      for (T& state : states) state = state * factor + gradient;
      parameter = parameter * factor + gradient;
    }
  };
};

// Two passes: LAMB writes the states in the first, and NovoGrad only reads the gradient there.
struct TouchLamb {
  template <class T>
  struct Step {
    static constexpr std::size_t kStates = 2;
    T factor;

    std::array<T, 2> measured(T parameter, T gradient, std::array<T, 2>& states) const {
      for (T& state : states) state = state * factor + gradient;
      return {parameter, states[0]};
    }
    void operator()(T& parameter, T, const std::array<T, 2>& states) const {
      parameter = parameter * factor + (states[0] + states[1]);
    }
  };
};

struct TouchNovoGrad {
  template <class T>
  struct Step {
    static constexpr std::size_t kStates = 1;
    T factor;

    std::array<T, 1> measured(T, T gradient, const std::array<T, 1>&) const { return {gradient}; }
    void operator()(T& parameter, T gradient, std::array<T, 1>& states) const {
      states[0] = states[0] * factor + gradient;
      parameter = parameter * factor + gradient;
    }
  };
};

constexpr Combine kSums[] = {Combine::kSum, Combine::kSum};

// The states and the norms are the optimizer's, so that the same memory is used; its arithmetic is not.
fused::Rule touching(const fused::Declaration& declaration, std::size_t states) {
  const std::string_view name = declaration.name;
  fused::Rule rule{.declaration = declaration};
  rule.prepare = [](fused::Hyper, const fused::Moment&, fused::Numbers&) { return Coefficients{0.5}; };
  if (name == "LAMB") {
    rule.kernel = [](fused::Hyper) { return fused::norms_kernel<TouchLamb, 0, Combine::kSum, Combine::kSum>(3); };
  } else if (name == "NovoGrad") {
    rule.declaration.norms = std::span(kSums).first(1);
    rule.kernel = [](fused::Hyper) { return fused::norms_kernel<TouchNovoGrad, 0, Combine::kSum>(1); };
  } else if (states == 1) {
    rule.kernel = [](fused::Hyper) { return fused::elements_kernel<Touch<1>>(1); };
  } else {
    rule.kernel = [](fused::Hyper) { return fused::elements_kernel<Touch<2>>(3); };
  }
  return rule;
}

double seconds_of(const std::function<void()>& work) {
  const auto begin = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// Parameters with gradients, and what torch's fused kernels take as states.
struct Lists {
  explicit Lists(std::span<char*> sizes) : states(sizes.size()) {
    parameters.reserve(sizes.size());  // updates point to them
    gradients.reserve(sizes.size());
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      const std::int64_t size = std::strtoll(sizes[i], nullptr, 10);
      parameters.push_back(at::randn({size}));
      gradients.push_back(at::randn({size}));
      first.push_back(at::zeros_like(parameters.back()));
      second.push_back(at::zeros_like(parameters.back()));
      steps.push_back(at::ones({}));
      updates.push_back({.parameter = &parameters.back(), .gradient = &gradients.back(), .state = &states[i]});
    }
  }

  std::vector<at::Tensor> parameters, gradients, first, second, steps;
  std::vector<optim::State> states;
  std::vector<optim::Update> updates;
};

std::function<void()> of_torch(std::string_view name, Lists& lists) {
  if (name == "AdamW") {
    return [&lists] {
      at::_fused_adamw_(lists.parameters, lists.gradients, lists.first, lists.second, {}, lists.steps, 1e-3, 0.9, 0.999,
                        1e-2, 1e-8, false, false);
    };
  }
  if (name == "Adam") {
    return [&lists] {
      at::_fused_adam_(lists.parameters, lists.gradients, lists.first, lists.second, {}, lists.steps, 1e-3, 0.9, 0.999,
                       0, 1e-8, false, false);
    };
  }
  if (name == "SGD") {
    return [&lists] {
      at::_fused_sgd_(lists.parameters, lists.gradients, lists.first, 0, 0.9, 1e-3, 0, false, false, false);
    };
  }
  return {};
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 4) return 2;
  at::set_num_threads(1);
  const c10::NoGradGuard no_grad;
  const auto functional = optim::Registry().find(argv[1]);
  if (functional == nullptr) return 2;
  const auto& declaration = functional->declaration();
  std::vector<std::pair<std::string_view, fused::HyperValue>> given;
  const auto gives = [&](const char* name, double value) {
    if (fused::hyper_index(declaration, name) < declaration.hyper.size()) given.emplace_back(name, value);
  };
  gives("lr", 1e-3);
  gives("momentum", 0.9);
  gives("nu", 0.7);
  const auto hyper = fused::hyper_values(declaration, given);
  Lists lists(std::span(argv + 3, argv + argc));
  fused::Threads threads(1);
  std::vector<optim::Update> one(1, lists.updates[0]);
  optim::State state;
  one[0].state = &state;
  functional->update({hyper}, one, threads);
  const auto used = std::ranges::count_if(state.tensors, [](const at::Tensor& tensor) { return tensor.defined(); });
  const auto touching_rule = touching(declaration, static_cast<std::size_t>(used));
  const optim::FusedFunctional touch(touching_rule);
  const auto stepping = [&](const optim::Functional& functional) {
    return [&] {
      functional.measure({hyper}, lists.updates, threads);
      functional.update({hyper}, lists.updates, threads);
    };
  };
  const auto torch = of_torch(declaration.name, lists);
  const std::vector<std::function<void()>> figures{stepping(*functional), torch ? torch : [] {}, stepping(touch)};
  std::vector<double> medians;
  const int rounds = std::atoi(argv[2]);
  for (const auto& figure : figures) {
    std::vector<double> samples;
    for (int round = 0; round < rounds + 3; ++round) samples.push_back(seconds_of(figure));
    std::ranges::sort(samples.begin() + 3, samples.end());
    medians.push_back(samples[3 + rounds / 2]);
  }
  std::printf("%.9f %.9f %.9f\n", medians[0], torch ? medians[1] : 0, medians[2]);
}
