// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string_view>

namespace lamina::base {

// The name of the module that has this parameter or module in it; that of the model is empty.
constexpr std::string_view outer(std::string_view name) {
  const auto dot = name.rfind('.');
  return name.substr(0, dot == std::string_view::npos ? 0 : dot);
}

}  // namespace lamina::base
