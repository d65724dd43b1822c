// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>

#include "lamina/fused/rule.h"
#include "lamina/optim/functional.h"

namespace lamina::optim {

enum class Pass : std::uint8_t { kMeasure, kUpdate };

// The two passes of a rule that has operations on arrays ([Note: values]), over tensors of any device. The updates have
// gradients, and are checked.

// Waits once for each device, for all norms together.
void measure_whole_tensors(const fused::Rule& rule, const Step& step, std::span<Update* const> updates);

// Waits for no device. `by_torch`: where torch has an operation for all of an update on a device, it is taken.
void update_whole_tensors(const fused::Rule& rule, const Step& step, std::span<Update* const> updates, bool by_torch);

}  // namespace lamina::optim
