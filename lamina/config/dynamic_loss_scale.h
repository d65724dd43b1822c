// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace lamina::config {

// How a dynamic loss scale moves.
struct DynamicLossScale {
  double init_scale = 4294967296;    // 2 to the power of 32
  double scale_factor = 2;           // divides it after an overflow, and multiplies it after a window without one
  std::int64_t scale_window = 1000;  // steps
  double min_scale = 1;
  std::int64_t delayed_shift = 1;  // so many overflows make it smaller once
  // Says whether one step without overflow makes them count anew; else a window does.
  bool consecutive_hysteresis = false;
};

}  // namespace lamina::config
