// SPDX-License-Identifier: Apache-2.0
#include "lamina/fused/fields.h"
#include "lamina/fused/kernel.h"
#include "lamina/fused/rules.h"

namespace lamina::fused {
namespace {

struct RAdamHyperparameters {
  double lr, beta1, beta2, eps, weight_decay, decoupled_weight_decay, maximize;
};

constexpr HyperField kHyper[] = {
    lr(1e-3), beta1(), beta2(), eps(1e-8), weight_decay(0), flag("decoupled_weight_decay"), flag("maximize")};
constexpr StateField kStateFields[] = {{"step", StateKind::kTorchsNumber}, {"exp_avg"}, {"exp_avg_sq"}};

struct RAdam {
  template <class T>
  struct Step {
    static constexpr std::size_t kStates = 2;
    T sign, l2, decay, beta1, rest1, beta2, rest2, adapts, eps, lr;

    void operator()(T& parameter, T gradient, std::array<T, 2>& states) const {
      T& average = states[0];
      T& square = states[1];
      gradient *= sign;
      if (l2 != 0) gradient += l2 * parameter;
      parameter *= decay;
      average = beta1 * average + rest1 * gradient;
      square = beta2 * square + rest2 * gradient * gradient;
      const T divisor = adapts != 0 ? sqrt(square) + eps : T(1);
      parameter -= lr * average / divisor;
    }
  };
};

}  // namespace

constexpr Rule kRAdam{
    .declaration = {.name = "RAdam", .hyper = kHyper, .states = kStateFields},
    .kernel = [](Hyper) { return elements_kernel<RAdam>(3); },
    .prepare =
        [](Hyper hyper, const Moment&, Numbers& numbers) {
          const auto h = read<RAdamHyperparameters>(hyper);
          const bool decoupled = h.decoupled_weight_decay != 0;
          const double step = ++numbers[0];
          const double correction2 = 1 - std::pow(h.beta2, step);
          const double rho_inf = 2 / (1 - h.beta2) - 1;
          const double rho = rho_inf - 2 * step * std::pow(h.beta2, step) / correction2;
          const bool adapts = rho > 5;
          double lr = h.lr / (1 - std::pow(h.beta1, step));
          if (adapts) {
            const double rectified = (rho - 4) * (rho - 2) * rho_inf / ((rho_inf - 4) * (rho_inf - 2) * rho);
            lr *= std::sqrt(rectified * correction2);
          }
          return coefficients<RAdam>({.sign = h.maximize != 0 ? -1.0 : 1.0,
                                      .l2 = decoupled ? 0 : h.weight_decay,
                                      .decay = decoupled ? 1 - h.lr * h.weight_decay : 1,
                                      .beta1 = h.beta1,
                                      .rest1 = 1 - h.beta1,
                                      .beta2 = h.beta2,
                                      .rest2 = 1 - h.beta2,
                                      .adapts = adapts ? 1.0 : 0.0,
                                      .eps = h.eps,
                                      .lr = lr});
        },
};

}  // namespace lamina::fused
