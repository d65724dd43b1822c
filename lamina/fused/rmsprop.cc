// SPDX-License-Identifier: Apache-2.0
#include "lamina/fused/fields.h"
#include "lamina/fused/kernel.h"
#include "lamina/fused/rules.h"

namespace lamina::fused {
namespace {

struct RmsPropHyperparameters {
  double lr, alpha, eps, weight_decay, momentum, centered, maximize;
};

constexpr HyperField kHyper[] = {lr(1e-2),        {"alpha", 0.99, Bound::kNotNegative, "alpha value"},
                                 eps(1e-8),       weight_decay(0),
                                 momentum(0),     flag("centered"),
                                 flag("maximize")};
constexpr StateField kStateFields[] = {
    {"step", StateKind::kTorchsNumber}, {"square_avg"}, {"momentum_buffer"}, {"grad_avg"}};

template <bool WithMomentum, bool Centered>
struct RmsProp {
  template <class T>
  struct Step {
    static constexpr std::size_t kStates = 1 + WithMomentum + Centered;
    T lr, alpha, rest, eps, weight_decay, momentum, sign;

    void operator()(T& parameter, T gradient, std::array<T, kStates>& states) const {
      T& square = states[0];
      gradient *= sign;
      if (weight_decay != 0) gradient += weight_decay * parameter;
      square = alpha * square + rest * gradient * gradient;
      T variance = square;
      if constexpr (Centered) {
        T& average = states[kStates - 1];
        average = alpha * average + rest * gradient;
        variance -= average * average;
      }
      const T direction = gradient / (sqrt(variance) + eps);
      if constexpr (WithMomentum) {
        states[1] = momentum * states[1] + direction;
        parameter -= lr * states[1];
      } else {
        parameter -= lr * direction;
      }
    }
  };
};

}  // namespace

constexpr Rule kRmsProp{
    .declaration = {.name = "RMSprop", .hyper = kHyper, .states = kStateFields},
    .kernel =
        [](Hyper hyper) {
          const auto h = read<RmsPropHyperparameters>(hyper);
          if (h.momentum == 0) {
            return h.centered == 0 ? elements_kernel<RmsProp<false, false>>(1)
                                   : elements_kernel<RmsProp<false, true>>(5);
          }
          return h.centered == 0 ? elements_kernel<RmsProp<true, false>>(3) : elements_kernel<RmsProp<true, true>>(7);
        },
    .prepare =
        [](Hyper hyper, const Moment&, Numbers& numbers) {
          const auto h = read<RmsPropHyperparameters>(hyper);
          ++numbers[0];
          return coefficients<RmsProp<true, true>>(
              {h.lr, h.alpha, 1 - h.alpha, h.eps, h.weight_decay, h.momentum, h.maximize != 0 ? -1.0 : 1.0});
        },
};

}  // namespace lamina::fused
