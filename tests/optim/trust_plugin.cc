// SPDX-License-Identifier: Apache-2.0
// An optimizer as a user's library has it: a step along the gradient, as long as lr times the parameter's norm.
#include <cmath>

#include "lamina/fused/plugin.h"

namespace {

template <class T>
void update(const double* coefficients, std::size_t count, T* parameter, const T* gradient, T* const* states) {
  for (std::size_t i = 0; i < count; ++i) {
    states[0][i] += gradient[i];
    parameter[i] -= static_cast<T>(coefficients[0]) * gradient[i];
  }
}

template <class T>
void measure(const double*, std::size_t count, const T* parameter, const T* gradient, T* const*, double* norms) {
  norms[0] = norms[1] = 0;
  for (std::size_t i = 0; i < count; ++i) {
    norms[0] += static_cast<double>(parameter[i]) * parameter[i];
    norms[1] += static_cast<double>(gradient[i]) * gradient[i];
  }
}

constexpr LaminaHyper kHyper[] = {{"lr", NAN}};
constexpr const char* kStates[] = {"total"};
constexpr const char* kNumbers[] = {"step"};
constexpr LaminaOptimizer kTable{
    .version = kLaminaOptimizerVersion,
    .name = "Trust",
    .hyper = kHyper,
    .hyper_count = 1,
    .states = kStates,
    .state_count = 1,
    .numbers = kNumbers,
    .number_count = 1,
    .norm_count = 2,
    .check = [](const double* hyper) { return hyper[0] < 0 ? "Trust goes forward" : nullptr; },
    .prepare = [](const double*, int, double* numbers, double*) { ++numbers[0]; },
    .update_float = update<float>,
    .update_double = update<double>,
    .measure_float = measure<float>,
    .measure_double = measure<double>,
    .finish = [](const double* hyper, const double* norms, double*,
                 double* coefficients) { coefficients[0] = hyper[0] * std::sqrt(norms[0] / norms[1]); },
};

}  // namespace

const LaminaOptimizer* lamina_optimizer() { return &kTable; }
