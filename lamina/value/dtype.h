// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/core/ScalarType.h>

#include <optional>

#include "lamina/layout/dtype.h"

namespace lamina::value {

// torch's kind of elements as lamina's own; none for one that lamina does not know.
std::optional<layout::DType> dtype_of(at::ScalarType type);

// True of the types of 16 bits whose sums and norms are taken in float32.
constexpr bool is_half(at::ScalarType type) { return type == at::kHalf || type == at::kBFloat16; }

}  // namespace lamina::value
