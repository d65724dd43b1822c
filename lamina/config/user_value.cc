// SPDX-License-Identifier: Apache-2.0
#include "lamina/config/user_value.h"

#include <algorithm>
#include <cctype>
#include <nlohmann/json.hpp>

#include "lamina/base/edit_distance.h"
#include "lamina/base/error.h"
#include "lamina/base/json_text.h"
#include "lamina/base/str.h"
#include "lamina/config/json_reader.h"
#include "lamina/config/problems.h"

namespace lamina::config {
namespace {

UserValue user_value(const nlohmann::json& json) {
  UserValue found{scalar_of(json), show(scalar_of(json))};
  if (!json.is_object()) return found;
  found.entries.emplace();
  for (const auto& [key, held] : json.items()) found.entries->push_back({key, show(key), user_value(held)});
  return found;
}

struct InPython {
  std::string operator()(std::monostate) const { return "None"; }
  std::string operator()(bool value) const { return value ? "True" : "False"; }
  std::string operator()(const std::string& value) const { return base::str("'", value, "'"); }
  template <class T>
  std::string operator()(const T& value) const {
    return show(value);
  }
};

}  // namespace

const UserValue* UserValue::find(std::string_view key) const {
  if (!entries) return nullptr;
  const auto found = std::ranges::find(*entries, key, &UserEntry::key);
  return found == entries->end() ? nullptr : &found->value;
}

UserValue user_value(std::string_view json, std::string_view source) {
  try {
    return user_value(base::parse_json(json));
  } catch (const nlohmann::json::exception& error) {
    throw base::ConfigError(base::str(source, " is not valid JSON: ", json_reason(error)));
  }
}

std::string show(const Scalar& value, Notation notation) {
  return notation == Notation::kJson ? show(value) : std::visit(InPython{}, value);
}

std::string lower(std::string_view text) {
  std::string found(text);
  std::ranges::transform(found, found.begin(), [](unsigned char each) { return std::tolower(each); });
  return found;
}

std::string word_of(const UserValue& given) {
  if (std::holds_alternative<std::monostate>(given.value)) return "none";
  if (const auto* text = std::get_if<std::string>(&given.value)) return lower(*text);
  return lower(std::holds_alternative<Unreadable>(given.value) ? given.shown : show(given.value));
}

std::string nearest_of(std::string_view given, const std::vector<std::string_view>& names, double least) {
  const std::string word = lower(given);
  const auto found = base::nearest(names, word, lower);
  const auto longest = static_cast<double>(std::max({word.size(), found.size(), std::size_t{1}}));
  const auto distance = static_cast<double>(base::edit_distance(lower(found), word));
  return 1 - distance / longest < least ? "" : std::string(found);
}

}  // namespace lamina::config
