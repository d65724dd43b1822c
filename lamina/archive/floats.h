// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <span>
#include <vector>

#include "lamina/layout/dtype.h"

namespace lamina::archive {

// The kinds of floating elements that are computed with here: float16, bfloat16, float32, float64.
bool is_floating(layout::DType dtype);

// Elements of one of these kinds as float64. Replaces what was in `to`.
void widen(layout::DType dtype, std::span<const std::byte> from, std::vector<double>& to);

// Elements of one of these kinds as another one, rounded to nearest, ties to even. Replaces what was in `converted`.
// Returns how many finite ones were too large for that, and are infinite now.
std::size_t convert(layout::DType from, std::span<const std::byte> bytes, layout::DType to,
                    std::vector<std::byte>& converted);

}  // namespace lamina::archive
