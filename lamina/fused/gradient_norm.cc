// SPDX-License-Identifier: Apache-2.0
#include <array>

#include "lamina/fused/kernel.h"
#include "lamina/fused/rules.h"

namespace lamina::fused {
namespace {

constexpr Combine kNorms[] = {Combine::kSum};

struct GradientNorm {
  template <class T>
  struct Step {
    static constexpr std::size_t kStates = 0;
    T unused;

    std::array<T, 1> measured(T, T gradient, const std::array<T, 0>&) const { return {gradient}; }
    void operator()(T&, T, const std::array<T, 0>&) const {}
  };
};

}  // namespace

constexpr Rule kGradientNorm{
    .declaration = {.name = "gradient norm", .needs = Needs::kNorms, .norms = kNorms},
    .kernel = [](Hyper) { return norms_kernel<GradientNorm, 0, Combine::kSum>(0); },
    .prepare = [](Hyper, const Moment&, Numbers&) { return Coefficients{}; },
    .finish = [](Hyper, const Norms&, const Moment&, Numbers&, Coefficients&) {},
};

std::span<const Rule* const> rules() {
  static constexpr std::array kAll{&kSgd,    &kAdam,  &kAdamW, &kAdagrad, &kAdadelta, &kRmsProp, &kRprop,
                                   &kAdamax, &kNAdam, &kRAdam, &kLamb,    &kNovoGrad, &kQhm};
  return kAll;
}

}  // namespace lamina::fused
