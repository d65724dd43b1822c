// SPDX-License-Identifier: Apache-2.0
#include "lamina/fused/fields.h"
#include "lamina/fused/kernel.h"
#include "lamina/fused/rules.h"

namespace lamina::fused {
namespace {

struct LambHyperparameters {
  double lr, bias_correction, beta1, beta2, eps, weight_decay, adam_w_mode, grad_averaging, max_grad_norm, use_nvlamb;
};

constexpr HyperField kHyper[] = {lr(1e-3),
                                 flag("bias_correction", true),
                                 beta1(),
                                 beta2(),
                                 eps(1e-6),
                                 weight_decay(0.01),
                                 flag("adam_w_mode", true),
                                 flag("grad_averaging", true),
                                 {"max_grad_norm", 1, Bound::kNotNegative, "max_grad_norm value"},
                                 flag("use_nvlamb")};
constexpr StateField kStateFields[] = {{"step", StateKind::kTorchsNumber}, {"exp_avg"}, {"exp_avg_sq"}};
constexpr Combine kNorms[] = {Combine::kSum, Combine::kSum};  // of the parameter and of the direction

// The first pass advances the averages; the second computes the direction from them once more, which costs as much
// memory traffic as keeping it would, and no memory.
struct Lamb {
  template <class T>
  struct Step {
    static constexpr std::size_t kStates = 2;
    T clip, l2, decay, beta1, beta3, beta2, rest2, scale1, scale2, eps, lr;

    std::array<T, 2> measured(T parameter, T gradient, std::array<T, 2>& states) const {
      T& average = states[0];
      T& square = states[1];
      gradient *= clip;
      if (l2 != 0) gradient += l2 * parameter;
      average = beta1 * average + beta3 * gradient;
      square = beta2 * square + rest2 * gradient * gradient;
      return {parameter, direction(parameter, states)};
    }

    void operator()(T& parameter, T, const std::array<T, 2>& states) const {
      parameter -= lr * direction(parameter, states);
    }

    T direction(T parameter, const std::array<T, 2>& states) const {
      const T adam = states[0] * scale1 / (sqrt(states[1] * scale2) + eps);
      return decay != 0 ? adam + decay * parameter : adam;
    }
  };
};

Coefficients prepared(Hyper hyper, const Moment& moment, Numbers& numbers) {
  const auto h = read<LambHyperparameters>(hyper);
  const double step = ++numbers[0];
  const bool clips = h.max_grad_norm > 0 && moment.gradient_norm > h.max_grad_norm;
  const bool decoupled = h.adam_w_mode != 0, corrects = h.bias_correction != 0;
  return coefficients<Lamb>({.clip = clips ? h.max_grad_norm / moment.gradient_norm : 1,
                             .l2 = decoupled ? 0 : h.weight_decay,
                             .decay = decoupled ? h.weight_decay : 0,
                             .beta1 = h.beta1,
                             .beta3 = h.grad_averaging != 0 ? 1 - h.beta1 : 1,
                             .beta2 = h.beta2,
                             .rest2 = 1 - h.beta2,
                             .scale1 = corrects ? 1 / (1 - std::pow(h.beta1, step)) : 1,
                             .scale2 = corrects ? 1 / (1 - std::pow(h.beta2, step)) : 1,
                             .eps = h.eps,
                             .lr = h.lr});
}

// A parameter moves by lr times its own norm, unless it is not decayed.
void finish(Hyper hyper, const Norms& norms, const Moment&, Numbers&, Coefficients& coefficients) {
  const auto h = read<LambHyperparameters>(hyper);
  if (h.use_nvlamb == 0 && h.weight_decay == 0) return;
  if (norms[0] == 0 || norms[1] == 0) return;
  auto step = step_of<Lamb, double>(coefficients);
  step.lr = h.lr * std::sqrt(norms[0] / norms[1]);
  coefficients = fused::coefficients<Lamb>(step);
}

}  // namespace

constexpr Rule kLamb{
    .declaration = {.name = "LAMB",
                    .needs = Needs::kNorms,
                    .hyper = kHyper,
                    .states = kStateFields,
                    .norms = kNorms,
                    .gradient_norm = true},
    .kernel = [](Hyper) { return norms_kernel<Lamb, 0, Combine::kSum, Combine::kSum>(3); },
    .prepare = prepared,
    .finish = finish,
};

}  // namespace lamina::fused
