// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/core/ScalarType.h>

#include <optional>

#include "lamina/layout/dtype.h"

namespace lamina::value {

// torch's kind of elements as lamina's own; none for one that lamina does not know.
std::optional<layout::DType> dtype_of(at::ScalarType type);

}  // namespace lamina::value
