// SPDX-License-Identifier: Apache-2.0
// Hyper-parameters that several rules have, with torch's words for bad values.
#pragma once

#include "lamina/fused/declaration.h"

namespace lamina::fused {

constexpr HyperField lr(double preset) { return {"lr", preset, Bound::kNotNegative, "learning rate"}; }
constexpr HyperField beta1() { return {"beta1", 0.9, Bound::kFraction, "beta parameter at index 0", "", "betas"}; }
constexpr HyperField beta2() { return {"beta2", 0.999, Bound::kFraction, "beta parameter at index 1", "", "betas"}; }
constexpr HyperField eps(double preset) { return {"eps", preset, Bound::kNotNegative, "epsilon value"}; }
constexpr HyperField momentum(double preset) { return {"momentum", preset, Bound::kNotNegative, "momentum value"}; }
constexpr HyperField weight_decay(double preset) {
  return {"weight_decay", preset, Bound::kNotNegative, "weight_decay value"};
}
constexpr HyperField flag(const char* name, bool preset = false) { return {name, preset ? 1.0 : 0.0, Bound::kFlag}; }

}  // namespace lamina::fused
