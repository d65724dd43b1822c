// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <string_view>

namespace lamina::base {

// The fewest insertions, removals and replacements of one character that turn `a` into `b` (Levenshtein's distance).
std::size_t edit_distance(std::string_view a, std::string_view b);

}  // namespace lamina::base
