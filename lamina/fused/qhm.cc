// SPDX-License-Identifier: Apache-2.0
#include "lamina/fused/fields.h"
#include "lamina/fused/kernel.h"
#include "lamina/fused/rules.h"

namespace lamina::fused {
namespace {

struct QhmHyperparameters {
  double lr, momentum, nu, weight_decay, weight_decay_type;
};

constexpr HyperField kHyper[] = {lr(kRequired),
                                 momentum(kRequired),
                                 {"nu", kRequired},
                                 weight_decay(0),
                                 {"weight_decay_type", 0, Bound::kChoice, "weight_decay_type value", "grad direct"}};
constexpr StateField kStateFields[] = {{"momentum_buffer"}};

struct Qhm {
  template <class T>
  struct Step {
    static constexpr std::size_t kStates = 1;
    T l2, decay, momentum, rest, lr_buffer, lr_gradient;

    void operator()(T& parameter, T gradient, std::array<T, 1>& states) const {
      T& buffer = states[0];
      if (l2 != 0) gradient += l2 * parameter;
      parameter *= decay;
      buffer = momentum * buffer + rest * gradient;
      parameter -= lr_buffer * buffer;
      parameter -= lr_gradient * gradient;
    }
  };
};

}  // namespace

constexpr Rule kQhm{
    .declaration = {.name = "QHM", .hyper = kHyper, .states = kStateFields},
    .kernel = [](Hyper) { return elements_kernel<Qhm>(1); },
    .prepare =
        [](Hyper hyper, const Moment&, Numbers&) {
          const auto h = read<QhmHyperparameters>(hyper);
          const bool direct = h.weight_decay_type != 0;
          return coefficients<Qhm>({direct ? 0 : h.weight_decay, direct ? 1 - h.lr * h.weight_decay : 1, h.momentum,
                                    1 - h.momentum, h.lr * h.nu, h.lr * (1 - h.nu)});
        },
};

}  // namespace lamina::fused
