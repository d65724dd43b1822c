// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <exception>
#include <string>

namespace lamina::config {

// Why a text is not valid JSON, "line 1, column 5: syntax error ...", without the prefix of the library that threw. A
// number beyond doubles has no position.
inline std::string json_reason(const std::exception& error) {
  const std::string text = error.what();
  const auto at = text.find("line ");
  return at == std::string::npos ? text : text.substr(at);
}

}  // namespace lamina::config
