// SPDX-License-Identifier: Apache-2.0
#include "lamina/config/json_reader.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "lamina/base/error.h"
#include "lamina/base/str.h"

namespace lamina::config {
namespace {

// At most so many characters of what stands in a file.
std::string shown(const nlohmann::json& json) {
  constexpr std::size_t kMost = 60;
  const std::string text = json.dump(-1, ' ', true, nlohmann::json::error_handler_t::replace);
  return text.size() > kMost ? text.substr(0, kMost) + "..." : text;
}

}  // namespace

JsonReader::JsonReader(const Json& json, std::string where) : json_(json), where_(std::move(where)) {
  if (json.is_object()) return;
  throw base::ConfigError(base::str(where_.empty() ? "the file" : where_, ": ", shown(json), " is not an object"));
}

void JsonReader::refuse(const std::string& key, const std::string& problem) const {
  throw base::ConfigError(base::str(where_.empty() ? "" : where_ + ": ", key, ": ", problem));
}

bool JsonReader::has(const std::string& key) {
  asked_.push_back(key);
  return json_.contains(key) && !json_[key].is_null();
}

const JsonReader::Json& JsonReader::at(const std::string& key) {
  asked_.push_back(key);
  if (!json_.contains(key)) refuse(key, "is missing");
  return json_[key];
}

double JsonReader::number(const std::string& key, double least, double most) {
  const Json& value = at(key);
  if (value.is_number() && value >= least && value <= most) return value;
  refuse(key, base::str(shown(value), " is not allowed; expected a number from ", least, " to ", most));
}

std::int64_t JsonReader::integer(const std::string& key, std::int64_t least, std::int64_t most) {
  const Json& value = at(key);
  const bool whole = value.is_number_integer() || (value.is_number() && std::trunc(value.get<double>()) == value);
  // Compared as a double first: what does not fit into 64 bits is far beyond.
  if (whole && value.get<double>() >= static_cast<double>(least) && value.get<double>() <= static_cast<double>(most)) {
    return value.get<std::int64_t>();
  }
  refuse(key, base::str(shown(value), " is not allowed; expected an integer from ", least, " to ", most));
}

std::string JsonReader::text(const std::string& key) {
  const Json& value = at(key);
  if (!value.is_string()) refuse(key, base::str(shown(value), " is not allowed; expected a string"));
  return value;
}

bool JsonReader::flag(const std::string& key) {
  const Json& value = at(key);
  if (!value.is_boolean()) refuse(key, base::str(shown(value), " is not allowed; expected true or false"));
  return value;
}

const JsonReader::Json& JsonReader::list(const std::string& key) {
  const Json& value = at(key);
  if (!value.is_array()) refuse(key, base::str(shown(value), " is not allowed; expected a list"));
  return value;
}

std::string JsonReader::id(const std::string& key) {
  const Json& value = at(key);
  if (auto found = as_id(value)) return *found;
  refuse(key, base::str(shown(value), " is not allowed; expected an integer or a string"));
}

void JsonReader::finish() const {
  for (const auto& [key, value] : json_.items()) {
    if (!std::ranges::count(asked_, key)) refuse(key, "is no key here");
  }
}

std::optional<std::string> as_id(const nlohmann::json& json) {
  if (json.is_string()) return json.get<std::string>();
  if (json.is_number_integer()) return json.dump();
  return std::nullopt;
}

Scalar scalar_of(const nlohmann::json& json) {
  constexpr auto kLargest = static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max());
  if (json.is_null()) return {};
  if (json.is_boolean()) return json.get<bool>();
  if (json.is_number_float()) return json.get<double>();
  if (json.is_string()) return json.get<std::string>();
  const auto is_text = [](const nlohmann::json& item) { return item.is_string(); };
  if (json.is_array() && std::ranges::all_of(json, is_text)) return json.get<std::vector<std::string>>();
  const bool fits = !json.is_number_unsigned() || json.get<std::uint64_t>() <= kLargest;
  if (json.is_number_integer() && fits) return json.get<std::int64_t>();
  return Unreadable{json.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace)};
}

}  // namespace lamina::config
