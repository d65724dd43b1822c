// SPDX-License-Identifier: Apache-2.0
#include "lamina/fused/fields.h"
#include "lamina/fused/kernel.h"
#include "lamina/fused/rules.h"

namespace lamina::fused {
namespace {

struct AdadeltaHyperparameters {
  double lr, rho, eps, weight_decay, maximize;
};

constexpr HyperField kHyper[] = {
    lr(1), {"rho", 0.9, Bound::kUpToOne, "rho value"}, eps(1e-6), weight_decay(0), flag("maximize")};
constexpr StateField kStateFields[] = {{"step", StateKind::kTorchsNumber}, {"square_avg"}, {"acc_delta"}};

struct Adadelta {
  template <class T>
  struct Step {
    static constexpr std::size_t kStates = 2;
    T lr, rho, rest, eps, weight_decay, sign;

    void operator()(T& parameter, T gradient, std::array<T, 2>& states) const {
      T& square = states[0];
      T& deltas = states[1];
      gradient *= sign;
      if (weight_decay != 0) gradient += weight_decay * parameter;
      square = rho * square + rest * gradient * gradient;
      const T delta = sqrt(deltas + eps) / sqrt(square + eps) * gradient;
      deltas = rho * deltas + rest * delta * delta;
      parameter -= lr * delta;
    }
  };
};

}  // namespace

constexpr Rule kAdadelta{
    .declaration = {.name = "Adadelta", .hyper = kHyper, .states = kStateFields},
    .kernel = [](Hyper) { return elements_kernel<Adadelta>(3); },
    .prepare =
        [](Hyper hyper, const Moment&, Numbers& numbers) {
          const auto h = read<AdadeltaHyperparameters>(hyper);
          ++numbers[0];
          return coefficients<Adadelta>({h.lr, h.rho, 1 - h.rho, h.eps, h.weight_decay, h.maximize != 0 ? -1.0 : 1.0});
        },
};

}  // namespace lamina::fused
