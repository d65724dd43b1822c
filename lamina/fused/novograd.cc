// SPDX-License-Identifier: Apache-2.0
#include "lamina/fused/fields.h"
#include "lamina/fused/kernel.h"
#include "lamina/fused/rules.h"

namespace lamina::fused {
namespace {

struct NovoGradHyperparameters {
  double lr, bias_correction, beta1, beta2, eps, weight_decay, reg_inside_moment, grad_averaging, norm_type, init_zero;
};

constexpr HyperField kHyper[] = {lr(1e-3),
                                 flag("bias_correction", true),
                                 beta1(),
                                 beta2(),
                                 eps(1e-8),
                                 weight_decay(0),
                                 flag("reg_inside_moment"),
                                 flag("grad_averaging", true),
                                 {"norm_type", 2},  // 2, or 0 for the largest absolute value
                                 flag("init_zero")};
// The second average is of the gradient's norm, not of its square.
constexpr StateField kStateFields[] = {
    {"step", StateKind::kTorchsNumber}, {"exp_avg_sq", StateKind::kNumber}, {"exp_avg"}};
constexpr Combine kNorms[] = {Combine::kSum, Combine::kMax};

struct NovoGrad {
  template <class T>
  struct Step {
    static constexpr std::size_t kStates = 1;
    T inside, beta1, beta3, scale1, scale2, decay, lr;

    std::array<T, 1> measured(T, T gradient, const std::array<T, 1>&) const { return {gradient}; }

    void operator()(T& parameter, T gradient, std::array<T, 1>& states) const {
      T& average = states[0];
      if (inside != 0) {
        average = beta1 * average + beta3 * (gradient * scale2 + decay * parameter);
        parameter -= lr * (average * scale1);
      } else {
        average = beta1 * average + beta3 * gradient;
        parameter -= lr * (average * scale1 * scale2 + decay * parameter);
      }
    }
  };
};

double blended(const NovoGradHyperparameters& h, const Norms& norms, const Moment& moment, double before) {
  const bool largest = h.norm_type == 0;
  const double norm = largest ? norms[1] : std::sqrt(norms[0]);
  if (moment.first && h.init_zero == 0) return norm;
  if (largest) return h.beta2 * before + (1 - h.beta2) * norm;
  return std::sqrt(h.beta2 * before * before + (1 - h.beta2) * norm * norm);
}

}  // namespace

constexpr Rule kNovoGrad{
    .declaration =
        {.name = "NovoGrad", .needs = Needs::kNorms, .hyper = kHyper, .states = kStateFields, .norms = kNorms},
    .check = [](Hyper hyper, const void*) -> const char* {
      const double norm_type = read<NovoGradHyperparameters>(hyper).norm_type;
      return norm_type == 0 || norm_type == 2 ? nullptr : "NovoGrad supports the norms 2 and 0, the largest, only";
    },
    .kernel =
        [](Hyper hyper) {
          const bool largest = read<NovoGradHyperparameters>(hyper).norm_type == 0;
          return largest ? norms_kernel<NovoGrad, 1, Combine::kMax>(1) : norms_kernel<NovoGrad, 0, Combine::kSum>(1);
        },
    .prepare =
        [](Hyper hyper, const Moment&, Numbers& numbers) {
          const auto h = read<NovoGradHyperparameters>(hyper);
          const double step = ++numbers[0];
          return coefficients<NovoGrad>({.inside = h.reg_inside_moment,
                                         .beta1 = h.beta1,
                                         .beta3 = h.grad_averaging != 0 ? 1 - h.beta1 : 1,
                                         .scale1 = h.bias_correction != 0 ? 1 / (1 - std::pow(h.beta1, step)) : 1,
                                         .decay = h.weight_decay,
                                         .lr = h.lr});
        },
    .finish =
        [](Hyper hyper, const Norms& norms, const Moment& moment, Numbers& numbers, Coefficients& all) {
          const auto h = read<NovoGradHyperparameters>(hyper);
          const double norm = numbers[1] = blended(h, norms, moment, numbers[1]);
          const double correction = h.bias_correction != 0 ? std::sqrt(1 - std::pow(h.beta2, numbers[0])) : 1;
          auto step = step_of<NovoGrad, double>(all);
          step.scale2 = 1 / (norm / correction + h.eps);
          all = coefficients<NovoGrad>(step);
        },
};

}  // namespace lamina::fused
