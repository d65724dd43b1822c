// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <iostream>
#include <nlohmann/json.hpp>

#include "lamina/base/coded.h"
#include "lamina/base/printable.h"
#include "lamina/base/str.h"

// Every output of the commands that may hold a name of somebody else's: see [Note: printable].
namespace lamina::command {

// Prints one line on stdout.
template <class... Parts>
void say(const Parts&... parts) {
  std::cout << base::printable_line(base::without_hints(base::str(parts...))) << '\n';
}
// Prints a text of several lines.
inline void say_text(const std::string& text) { std::cout << base::printable(text); }
// Prints one line on stderr, and below it where to read more of an error that has a code.
template <class... Parts>
void complain(const Parts&... parts) {
  const auto text = base::str(parts...);
  std::cerr << base::printable_line(base::without_hints(text)) << base::hint_of(text) << '\n';
}
// JSON as one line, of ASCII: names of files need be no UTF-8.
inline void say_json(const nlohmann::json& json) {
  std::cout << json.dump(-1, ' ', /*ensure_ascii=*/true, nlohmann::json::error_handler_t::replace) << '\n';
}

}  // namespace lamina::command
