// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <exception>
#include <string>
#include <string_view>
#include <vector>

namespace lamina::config {

// "name: value is not allowed; expected ..."
std::string not_allowed(std::string_view name, std::string_view value, std::string_view expected);

// Says why a text is not valid JSON, "line 1, column 5: syntax error ...", without the prefix of the library that
// threw. A number beyond doubles has no position.
std::string json_reason(const std::exception& error);

// Collects what is wrong with a set of keys, so that a user reads all of it at once.
class Problems {
 public:
  // `text` is one line that begins with the key as the user named it; `key` is what `concern` knows it by.
  void add(std::string_view key, std::string text);

  // True where something is wrong with this key; a rule about it would then only repeat it.
  bool concern(std::string_view key) const;

  // Throws ConfigError, "`subject`: 2 errors" and the lines in the order they came; does nothing when there are none.
  void raise(std::string_view subject) const;

 private:
  std::vector<std::string> keys_;
  std::vector<std::string> lines_;
};

}  // namespace lamina::config
