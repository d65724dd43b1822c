// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string_view>

namespace lamina::base {

// Says whether a name is that of a module, or of what is inside of it: "h.1.bias" is in "h.1" and "h", not in "h.11".
inline bool is_in_module(std::string_view name, std::string_view module) {
  return name.starts_with(module) && (name.size() == module.size() || name[module.size()] == '.');
}

}  // namespace lamina::base
