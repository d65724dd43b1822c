// SPDX-License-Identifier: Apache-2.0
#include "lamina/fused/fields.h"
#include "lamina/fused/kernel.h"
#include "lamina/fused/rules.h"

namespace lamina::fused {
namespace {

struct NAdamHyperparameters {
  double lr, beta1, beta2, eps, weight_decay, momentum_decay, decoupled_weight_decay, maximize;
};

constexpr HyperField kHyper[] = {lr(2e-3),
                                 beta1(),
                                 beta2(),
                                 eps(1e-8),
                                 weight_decay(0),
                                 {"momentum_decay", 4e-3, Bound::kNotNegative, "momentum_decay value"},
                                 flag("decoupled_weight_decay"),
                                 flag("maximize")};
constexpr StateField kStateFields[] = {
    {"step", StateKind::kTorchsNumber}, {"mu_product", StateKind::kTorchsNumber}, {"exp_avg"}, {"exp_avg_sq"}};

struct NAdam {
  template <class T>
  struct Step {
    static constexpr std::size_t kStates = 2;
    T sign, l2, decay, beta1, rest1, beta2, rest2, scale2, eps, lr_gradient, lr_average;

    void operator()(T& parameter, T gradient, std::array<T, 2>& states) const {
      T& average = states[0];
      T& square = states[1];
      gradient *= sign;
      if (l2 != 0) gradient += l2 * parameter;
      parameter *= decay;
      average = beta1 * average + rest1 * gradient;
      square = beta2 * square + rest2 * gradient * gradient;
      parameter -= (lr_gradient * gradient + lr_average * average) / (sqrt(square) * scale2 + eps);
    }
  };
};

}  // namespace

constexpr Rule kNAdam{
    .declaration = {.name = "NAdam", .hyper = kHyper, .states = kStateFields},
    .kernel = [](Hyper) { return elements_kernel<NAdam>(3); },
    .prepare =
        [](Hyper hyper, const Moment& moment, Numbers& numbers) {
          const auto h = read<NAdamHyperparameters>(hyper);
          const bool decoupled = h.decoupled_weight_decay != 0;
          const double step = ++numbers[0];
          const auto mu = [&](double at) { return h.beta1 * (1 - 0.5 * std::pow(0.96, at * h.momentum_decay)); };
          const double before = moment.first ? 1 : numbers[1];
          const double product = numbers[1] =
              moment.double_numbers ? before * mu(step) : static_cast<float>(before) * static_cast<float>(mu(step));
          return coefficients<NAdam>({.sign = h.maximize != 0 ? -1.0 : 1.0,
                                      .l2 = decoupled ? 0 : h.weight_decay,
                                      .decay = decoupled ? 1 - h.lr * h.weight_decay : 1,
                                      .beta1 = h.beta1,
                                      .rest1 = 1 - h.beta1,
                                      .beta2 = h.beta2,
                                      .rest2 = 1 - h.beta2,
                                      .scale2 = 1 / std::sqrt(1 - std::pow(h.beta2, step)),
                                      .eps = h.eps,
                                      .lr_gradient = h.lr * (1 - mu(step)) / (1 - product),
                                      .lr_average = h.lr * mu(step + 1) / (1 - product * mu(step + 1))});
        },
};

}  // namespace lamina::fused
