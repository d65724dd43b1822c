// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "lamina/value/value.h"

namespace lamina::value {

Value to_list(const std::vector<std::int64_t>& numbers);
// Throws base::FormatError unless `list` is a list of whole numbers.
std::vector<std::int64_t> to_numbers(const Value& list);

}  // namespace lamina::value
