// SPDX-License-Identifier: Apache-2.0
#include "lamina/optim/loss_scale.h"

#include <algorithm>
#include <cmath>

#include "lamina/base/error.h"
#include "lamina/base/str.h"

namespace lamina::optim {
namespace {

void require(bool fits, const char* name, double value, const char* range) {
  if (!fits) throw base::UsageError(base::str("the loss scale's ", name, " is ", value, ": it must be ", range));
}

bool is_scale(double value) { return std::isfinite(value) && value > 0; }

}  // namespace

LossScale::LossScale(double scale) : is_dynamic_(false), state_{.scale = scale} {
  require(is_scale(scale), "value", scale, "a finite number above 0");
}

LossScale::LossScale(const DynamicLossScale& dynamic)
    : dynamic_(dynamic),
      is_dynamic_(true),
      state_{.scale = dynamic.init_scale, .overflows_left = dynamic.delayed_shift} {
  require(is_scale(dynamic.init_scale), "init_scale", dynamic.init_scale, "a finite number above 0");
  require(std::isfinite(dynamic.scale_factor) && dynamic.scale_factor > 1, "scale_factor", dynamic.scale_factor,
          "a finite number above 1");
  require(dynamic.scale_window >= 1, "scale_window", dynamic.scale_window, "at least 1 step");
  require(is_scale(dynamic.min_scale), "min_scale", dynamic.min_scale, "a finite number above 0");
  require(dynamic.delayed_shift >= 1, "delayed_shift", dynamic.delayed_shift, "at least 1 overflow");
}

void LossScale::update(bool overflow) {
  if (is_dynamic_ && overflow) {
    if (--state_.overflows_left < 1) {
      state_.scale = std::max(state_.scale / dynamic_.scale_factor, dynamic_.min_scale);
      state_.overflows_left = 1;
    }
    state_.last_overflow = state_.steps;
  } else if (is_dynamic_) {
    const bool window_over = (state_.steps - state_.last_overflow) % dynamic_.scale_window == 0;
    if (window_over && is_scale(state_.scale * dynamic_.scale_factor)) state_.scale *= dynamic_.scale_factor;
    if (window_over || dynamic_.consecutive_hysteresis) state_.overflows_left = dynamic_.delayed_shift;
  }
  ++state_.steps;
}

void LossScale::set_state(const State& state) {
  require(is_scale(state.scale), "saved value", state.scale, "a finite number above 0");
  require(state.overflows_left >= 1, "saved count of overflows", state.overflows_left, "at least 1");
  require(state.last_overflow < state.steps || state.steps == 0, "saved last overflow",
          static_cast<double>(state.last_overflow), "a step before the next one");
  state_ = state;
}

}  // namespace lamina::optim
