// SPDX-License-Identifier: Apache-2.0
#include "lamina/fused/fields.h"
#include "lamina/fused/kernel.h"
#include "lamina/fused/rules.h"

namespace lamina::fused {
namespace {

struct AdagradHyperparameters {
  double lr, lr_decay, weight_decay, initial_accumulator_value, eps, maximize;
};

constexpr HyperField kHyper[] = {
    lr(1e-2),        {"lr_decay", 0, Bound::kNotNegative, "lr_decay value"},
    weight_decay(0), {"initial_accumulator_value", 0, Bound::kNotNegative, "initial_accumulator_value value"},
    eps(1e-10),      flag("maximize")};
constexpr StateField kStateFields[] = {{"step", StateKind::kTorchsNumber},
                                       {"sum", StateKind::kLikeParameter, "initial_accumulator_value"}};

struct Adagrad {
  template <class T>
  struct Step {
    static constexpr std::size_t kStates = 1;
    T lr, weight_decay, eps, sign;

    void operator()(T& parameter, T gradient, std::array<T, 1>& states) const {
      T& sum = states[0];
      gradient *= sign;
      if (weight_decay != 0) gradient += weight_decay * parameter;
      sum += gradient * gradient;
      parameter -= lr * gradient / (sqrt(sum) + eps);
    }
  };
};

}  // namespace

constexpr Rule kAdagrad{
    .declaration = {.name = "Adagrad", .hyper = kHyper, .states = kStateFields},
    .kernel = [](Hyper) { return elements_kernel<Adagrad>(1); },
    .prepare =
        [](Hyper hyper, const Moment&, Numbers& numbers) {
          const auto h = read<AdagradHyperparameters>(hyper);
          const double before = numbers[0]++;
          return coefficients<Adagrad>(
              {h.lr / (1 + before * h.lr_decay), h.weight_decay, h.eps, h.maximize != 0 ? -1.0 : 1.0});
        },
};

}  // namespace lamina::fused
