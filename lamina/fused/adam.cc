// SPDX-License-Identifier: Apache-2.0
#include "lamina/fused/fields.h"
#include "lamina/fused/kernel.h"
#include "lamina/fused/rules.h"

namespace lamina::fused {
namespace {

struct AdamHyperparameters {
  double lr, beta1, beta2, eps, weight_decay, amsgrad, maximize, bias_correction, decoupled_weight_decay;
};

template <bool Decoupled>
constexpr HyperField kHyper[] = {lr(1e-3),
                                 beta1(),
                                 beta2(),
                                 eps(1e-8),
                                 weight_decay(Decoupled ? 1e-2 : 0),
                                 flag("amsgrad"),
                                 flag("maximize"),
                                 flag("bias_correction", true),
                                 flag("decoupled_weight_decay", Decoupled)};
constexpr StateField kStateFields[] = {
    {"step", StateKind::kTorchsNumber}, {"exp_avg"}, {"exp_avg_sq"}, {"max_exp_avg_sq"}};

template <bool Amsgrad>
struct Adam {
  template <class T>
  struct Step {
    static constexpr std::size_t kStates = Amsgrad ? 3 : 2;
    T sign, l2, decay, beta1, rest1, beta2, rest2, scale2, eps, lr;

    void operator()(T& parameter, T gradient, std::array<T, kStates>& states) const {
      T& average = states[0];
      T& square = states[1];
      gradient *= sign;
      if (l2 != 0) gradient += l2 * parameter;
      parameter *= decay;
      average = beta1 * average + rest1 * gradient;
      square = beta2 * square + rest2 * gradient * gradient;
      T second = square;
      if constexpr (Amsgrad) second = states[2] = larger(states[2], square);
      parameter -= lr * average / (sqrt(second) * scale2 + eps);
    }
  };
};

template <bool Decoupled>
constexpr Rule rule(const char* name) {
  return {
      .declaration = {.name = name, .hyper = kHyper<Decoupled>, .states = kStateFields},
      .kernel =
          [](Hyper hyper) {
            return read<AdamHyperparameters>(hyper).amsgrad == 0 ? elements_kernel<Adam<false>>(3)
                                                                 : elements_kernel<Adam<true>>(7);
          },
      .prepare =
          [](Hyper hyper, const Moment&, Numbers& numbers) {
            const auto h = read<AdamHyperparameters>(hyper);
            const double step = ++numbers[0];
            const bool decoupled = h.decoupled_weight_decay != 0;
            const auto bias = [&](double beta) { return h.bias_correction != 0 ? 1 - std::pow(beta, step) : 1; };
            return coefficients<Adam<false>>({.sign = h.maximize != 0 ? -1.0 : 1.0,
                                              .l2 = decoupled ? 0 : h.weight_decay,
                                              .decay = decoupled ? 1 - h.lr * h.weight_decay : 1,
                                              .beta1 = h.beta1,
                                              .rest1 = 1 - h.beta1,
                                              .beta2 = h.beta2,
                                              .rest2 = 1 - h.beta2,
                                              .scale2 = 1 / std::sqrt(bias(h.beta2)),
                                              .eps = h.eps,
                                              .lr = h.lr / bias(h.beta1)});
          },
  };
}

}  // namespace

constexpr Rule kAdam = rule<false>("Adam");
constexpr Rule kAdamW = rule<true>("AdamW");

}  // namespace lamina::fused
