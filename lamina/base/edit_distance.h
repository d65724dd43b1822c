// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <functional>
#include <string_view>

namespace lamina::base {

// The fewest insertions, removals and replacements of one character that turn `a` into `b` (Levenshtein's distance).
std::size_t edit_distance(std::string_view a, std::string_view b);

// The first of those whose names are the nearest to this one; there is at least one.
template <class Range, class NameOf = std::identity>
const auto& nearest(const Range& range, std::string_view name, NameOf name_of = {}) {
  const auto distance = [&](const auto& each) { return edit_distance(std::invoke(name_of, each), name); };
  return *std::ranges::min_element(range, {}, distance);
}

}  // namespace lamina::base
