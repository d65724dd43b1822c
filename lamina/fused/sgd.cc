// SPDX-License-Identifier: Apache-2.0
#include "lamina/fused/fields.h"
#include "lamina/fused/kernel.h"
#include "lamina/fused/rules.h"

namespace lamina::fused {
namespace {

struct SgdHyperparameters {
  double lr, momentum, dampening, weight_decay, nesterov, maximize;
};

constexpr HyperField kHyper[] = {lr(1e-3),        momentum(0),      {"dampening"},
                                 weight_decay(0), flag("nesterov"), flag("maximize")};
constexpr StateField kStateFields[] = {{"momentum_buffer"}};

// To maximize, a step goes against the gradient: the coefficients of what it goes along have the other sign.
struct PlainSgd {
  template <class T>
  struct Step {
    static constexpr std::size_t kStates = 0;
    T lr, weight_decay;

    void operator()(T& parameter, T gradient, std::array<T, 0>&) const {
      if (weight_decay != 0) gradient += weight_decay * parameter;
      parameter -= lr * gradient;
    }
  };
};

struct Momentum {
  template <class T>
  struct Step {
    static constexpr std::size_t kStates = 1;
    T lr, weight_decay, momentum, keep, add, nesterov;

    void operator()(T& parameter, T gradient, std::array<T, 1>& states) const {
      T& buffer = states[0];
      if (weight_decay != 0) gradient += weight_decay * parameter;
      buffer = keep * buffer + add * gradient;
      parameter -= lr * (nesterov != 0 ? nesterov * gradient + momentum * buffer : buffer);
    }
  };
};

}  // namespace

constexpr Rule kSgd{
    .declaration = {.name = "SGD", .hyper = kHyper, .states = kStateFields},
    .check = [](Hyper hyper, const void*) -> const char* {
      const auto h = read<SgdHyperparameters>(hyper);
      if (h.nesterov != 0 && (h.momentum <= 0 || h.dampening != 0)) {
        return "Nesterov momentum requires a momentum and zero dampening";
      }
      return nullptr;
    },
    .kernel =
        [](Hyper hyper) {
          return read<SgdHyperparameters>(hyper).momentum == 0 ? elements_kernel<PlainSgd>(0)
                                                               : elements_kernel<Momentum>(1);
        },
    .prepare =
        [](Hyper hyper, const Moment& moment, Numbers&) {
          const auto h = read<SgdHyperparameters>(hyper);
          const double sign = h.maximize != 0 ? -1 : 1;
          if (h.momentum == 0) return coefficients<PlainSgd>({sign * h.lr, sign * h.weight_decay});
          // The first gradient is not dampened.
          const double keep = moment.first ? 0 : h.momentum, add = moment.first ? 1 : 1 - h.dampening;
          const double nesterov = h.nesterov != 0 ? sign : 0;
          return coefficients<Momentum>({h.lr, sign * h.weight_decay, h.momentum, keep, sign * add, nesterov});
        },
};

}  // namespace lamina::fused
