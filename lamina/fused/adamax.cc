// SPDX-License-Identifier: Apache-2.0
#include "lamina/fused/fields.h"
#include "lamina/fused/kernel.h"
#include "lamina/fused/rules.h"

namespace lamina::fused {
namespace {

struct AdamaxHyperparameters {
  double lr, beta1, beta2, eps, weight_decay, maximize;
};

constexpr HyperField kHyper[] = {lr(2e-3), beta1(), beta2(), eps(1e-8), weight_decay(0), flag("maximize")};
constexpr StateField kStateFields[] = {{"step", StateKind::kTorchsNumber}, {"exp_avg"}, {"exp_inf"}};

struct Adamax {
  template <class T>
  struct Step {
    static constexpr std::size_t kStates = 2;
    T lr, beta1, rest1, beta2, eps, weight_decay, sign;

    void operator()(T& parameter, T gradient, std::array<T, 2>& states) const {
      T& average = states[0];
      T& largest = states[1];
      gradient *= sign;
      if (weight_decay != 0) gradient += weight_decay * parameter;
      average = beta1 * average + rest1 * gradient;
      largest = larger(beta2 * largest, abs(gradient) + eps);
      parameter -= lr * average / largest;
    }
  };
};

}  // namespace

constexpr Rule kAdamax{
    .declaration = {.name = "Adamax", .hyper = kHyper, .states = kStateFields},
    .kernel = [](Hyper) { return elements_kernel<Adamax>(3); },
    .prepare =
        [](Hyper hyper, const Moment&, Numbers& numbers) {
          const auto h = read<AdamaxHyperparameters>(hyper);
          const double step = ++numbers[0];
          return coefficients<Adamax>({h.lr / (1 - std::pow(h.beta1, step)), h.beta1, 1 - h.beta1, h.beta2, h.eps,
                                       h.weight_decay, h.maximize != 0 ? -1.0 : 1.0});
        },
};

}  // namespace lamina::fused
