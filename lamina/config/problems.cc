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
  if (const auto line = text.find("line "); line != std::string::npos) return text.substr(line);
  const auto kind = text.find("] ");  // "[json.exception.type_error.302] "
  return text.starts_with("[json.") && kind != std::string::npos ? text.substr(kind + 2) : text;
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
