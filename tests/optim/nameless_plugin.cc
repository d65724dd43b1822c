// SPDX-License-Identifier: Apache-2.0
// An optimizer of a library that has forgotten the names of its states.
#include <cstddef>

#include "lamina/fused/plugin.h"

namespace {

template <class T>
void update(const double*, std::size_t, T*, const T*, T* const*) {}

constexpr LaminaOptimizer kTable{
    .version = kLaminaOptimizerVersion,
    .name = "Nameless",
    .state_count = 2,
    .prepare = [](const double*, int, double*, double*) {},
    .update_float = update<float>,
    .update_double = update<double>,
};

}  // namespace

const LaminaOptimizer* lamina_optimizer() { return &kTable; }
