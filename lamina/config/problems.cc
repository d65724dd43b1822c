// SPDX-License-Identifier: Apache-2.0
#include "lamina/config/problems.h"

#include <algorithm>
#include <utility>

#include "lamina/base/error.h"
#include "lamina/base/str.h"

namespace lamina::config {

std::string not_allowed(std::string_view name, std::string_view value, std::string_view expected) {
  return base::str(name, ": ", value, " is not allowed; expected ", expected);
}

std::string json_reason(const std::exception& error) {
  const std::string text = error.what();
  const auto at = text.find("line ");
  return at == std::string::npos ? text : text.substr(at);
}

void Problems::add(std::string_view key, std::string text) {
  keys_.emplace_back(key);
  lines_.push_back(std::move(text));
}

bool Problems::concern(std::string_view key) const { return std::find(keys_.begin(), keys_.end(), key) != keys_.end(); }

void Problems::raise(std::string_view subject) const {
  if (lines_.empty()) return;
  std::string message = base::str(subject, ": ", lines_.size(), lines_.size() == 1 ? " error" : " errors");
  for (const std::string& line : lines_) message += base::str("\n  ", line);
  throw base::ConfigError(message);
}

}  // namespace lamina::config
