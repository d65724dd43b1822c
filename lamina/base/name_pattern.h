// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <string_view>

namespace lamina::base {

// The name of a module with "*" for each number: "layers.*.up".
inline std::string as_pattern(std::string_view name) {
  std::string pattern;
  while (true) {
    const auto dot = name.find('.');
    const auto part = name.substr(0, dot);
    const bool is_number = !part.empty() && part.find_first_not_of("0123456789") == std::string_view::npos;
    pattern += is_number ? "*" : part;
    if (dot == std::string_view::npos) return pattern;
    pattern += '.';
    name.remove_prefix(dot + 1);
  }
}

}  // namespace lamina::base
