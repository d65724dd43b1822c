// SPDX-License-Identifier: Apache-2.0
// An optimizer in a shared library, in C: the library includes this header alone and exports `lamina_optimizer`.
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { kLaminaOptimizerVersion = 1 };

typedef struct LaminaHyper {
  const char* name;
  double preset;  // NaN: it has to be given
} LaminaHyper;

// A table that lives as long as the library. Functions are called from many threads at once, and keep nothing. `hyper`
// are the hyper-parameters in their order; the 16 `coefficients` are what `prepare` wants the loops to know.
typedef struct LaminaOptimizer {
  uint32_t version;  // kLaminaOptimizerVersion
  const char* name;
  const LaminaHyper* hyper;
  uint32_t hyper_count;
  const char* const* states;  // with an element for each of the parameter's, zero at first: 4 at most
  uint32_t state_count;
  const char* const* numbers;  // one number for a parameter, zero at first, as a count of steps: 4 at most
  uint32_t number_count;
  uint32_t norm_count;  // squares of what is measured of elements are summed over all of the parameter: 2 at most

  // Says in words what is wrong with hyper-parameters, or returns NULL. May be NULL itself.
  const char* (*check)(const double* hyper);
  // Once for a parameter in each pass. `first`: its states are new.
  void (*prepare)(const double* hyper, int first, double* numbers, double* coefficients);
  void (*update_float)(const double* coefficients, size_t count, float* parameter, const float* gradient,
                       float* const* states);
  void (*update_double)(const double* coefficients, size_t count, double* parameter, const double* gradient,
                        double* const* states);

  // NULL without norms. Writes the sums of squares over these elements; may write states.
  void (*measure_float)(const double* coefficients, size_t count, const float* parameter, const float* gradient,
                        float* const* states, double* norms);
  void (*measure_double)(const double* coefficients, size_t count, const double* parameter, const double* gradient,
                         double* const* states, double* norms);
  // Between measuring and updating, with the sums over all elements.
  void (*finish)(const double* hyper, const double* norms, double* numbers, double* coefficients);
} LaminaOptimizer;

const LaminaOptimizer* lamina_optimizer(void);

#ifdef __cplusplus
}
#endif
