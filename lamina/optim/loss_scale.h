// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "lamina/config/dynamic_loss_scale.h"

namespace lamina::optim {

using config::DynamicLossScale;

// Multiplies the loss before the backward, and divides gradients before the update: small ones of half precision would
// else be zeros. Where they overflow, the step is left out.
class LossScale {
 public:
  // The part of it that goes on after a restart.
  struct State {
    double scale = 1;
    std::int64_t overflows_left = 1;  // until it becomes smaller
    long steps = 0;                   // that were taken or left out
    long last_overflow = -1;          // the number of that step
  };

  // One that stays. Throws UsageError unless it is finite and above 0.
  explicit LossScale(double scale = 1);
  // Throws UsageError for values that make no sense.
  explicit LossScale(const DynamicLossScale& dynamic);

  double value() const { return state_.scale; }
  bool is_dynamic() const { return is_dynamic_; }
  // False for one that is always 1.
  bool is_on() const { return is_dynamic_ || state_.scale != 1; }

  // A step has been taken, or left out for an overflow.
  void update(bool overflow);

  const State& state() const { return state_; }
  // Throws UsageError for what cannot be a state.
  void set_state(const State& state);

 private:
  DynamicLossScale dynamic_;
  bool is_dynamic_;
  State state_;
};

}  // namespace lamina::optim
