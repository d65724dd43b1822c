// SPDX-License-Identifier: Apache-2.0
#include "lamina/fused/fields.h"
#include "lamina/fused/kernel.h"
#include "lamina/fused/rules.h"

namespace lamina::fused {
namespace {

struct RpropHyperparameters {
  double lr, eta_minus, eta_plus, least_step, most_step, maximize;
};

constexpr HyperField kHyper[] = {lr(1e-2),
                                 {"etaminus", 0.5, Bound::kBetween, "eta value at index 0", "", "etas"},
                                 {"etaplus", 1.2, Bound::kAboveOne, "eta value at index 1", "", "etas"},
                                 {"step_size_min", 1e-6, Bound::kAny, "", "", "step_sizes"},
                                 {"step_size_max", 50, Bound::kAny, "", "", "step_sizes"},
                                 flag("maximize")};
constexpr StateField kStateFields[] = {
    {"step", StateKind::kTorchsNumber}, {"prev"}, {"step_size", StateKind::kLikeParameter, "lr"}};

// As torch's: what is no number has the sign of zero, and moves nothing.
template <class T>
T by_sign(T decides, T negative, T zero, T positive) {
  const T not_positive = decides < 0 ? negative : zero;
  return decides > 0 ? positive : not_positive;
}

template <class T>
T bounded(T value, T least, T most) {
  value = value < least ? least : value;
  return value > most ? most : value;
}

struct Rprop {
  template <class T>
  struct Step {
    static constexpr std::size_t kStates = 2;
    T eta_minus, eta_plus, least, most, sign;

    void operator()(T& parameter, T gradient, std::array<T, 2>& states) const {
      T& before = states[0];
      T& size = states[1];
      gradient *= sign;
      const T agreement = gradient * before;
      size *= by_sign(agreement, eta_minus, T(1), eta_plus);
      size = bounded(size, least, most);
      before = by_sign(agreement, T(0), gradient, gradient);
      parameter -= by_sign(before, T(-1), T(0), T(1)) * size;
    }
  };
};

}  // namespace

constexpr Rule kRprop{
    .declaration = {.name = "Rprop", .hyper = kHyper, .states = kStateFields},
    .kernel = [](Hyper) { return elements_kernel<Rprop>(3); },
    .prepare =
        [](Hyper hyper, const Moment&, Numbers& numbers) {
          const auto h = read<RpropHyperparameters>(hyper);
          ++numbers[0];
          return coefficients<Rprop>(
              {h.eta_minus, h.eta_plus, h.least_step, h.most_step, h.maximize != 0 ? -1.0 : 1.0});
        },
};

}  // namespace lamina::fused
