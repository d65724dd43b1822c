// SPDX-License-Identifier: Apache-2.0
#include "lamina/config/config_json.h"

#include <limits>
#include <nlohmann/json.hpp>

#include "lamina/base/error.h"
#include "lamina/base/str.h"
#include "lamina/config/config.h"
#include "lamina/config/config_keys.h"
#include "lamina/config/json_reason.h"

namespace lamina::config {
namespace {

using Json = nlohmann::json;

Scalar scalar(const Json& json) {
  constexpr auto kLargest = static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max());
  if (json.is_null()) return {};
  if (json.is_boolean()) return json.get<bool>();
  if (json.is_number_float()) return json.get<double>();
  if (json.is_string()) return json.get<std::string>();
  const bool fits = !json.is_number_unsigned() || json.get<std::uint64_t>() <= kLargest;
  if (json.is_number_integer() && fits) return json.get<std::int64_t>();
  return Unreadable{json.dump(-1, ' ', false, Json::error_handler_t::replace)};
}

Json parse_object(std::string_view text, std::string_view source) {
  Json json;
  try {
    json = Json::parse(text);
  } catch (const Json::exception& error) {
    throw base::ConfigError(base::str(source, " is not valid JSON: ", json_reason(error)));
  }
  if (!json.is_object()) throw base::ConfigError(not_allowed(source, show(scalar(json)), "an object"));
  return json;
}

// Takes the parameters out of {"enabled": ..., "parameters": {...}}.
Json unwrap(const Json& json, bool& enabled, Problems& problems) {
  Json parameters = Json::object();
  for (const auto& [name, value] : json.items()) {
    if (name == "enabled" && value.is_boolean()) {
      enabled = value;
    } else if (name == "enabled") {
      problems.add(name, not_allowed(name, show(scalar(value)), "true or false"));
    } else if (name == "parameters" && value.is_object()) {
      parameters = value;
    } else if (name == "parameters") {
      problems.add(name, not_allowed(name, show(scalar(value)), "an object with the parameters"));
    } else {
      problems.add(name,
                   base::str(name, ": ", show(scalar(value)), " is not allowed beside \"enabled\" and \"parameters\"; ",
                             "expected inside \"parameters\""));
    }
  }
  return parameters;
}

}  // namespace

WrittenConfig read_written(std::string_view text, std::string_view source, Problems& problems) {
  const Json json = parse_object(text, source);
  WrittenConfig written;
  const bool wrapped = json.contains("enabled") || json.contains("parameters");
  const Json parameters = wrapped ? unwrap(json, written.enabled, problems) : json;
  for (const auto& [name, value] : parameters.items()) written.parameters.emplace_back(name, scalar(value));
  return written;
}

std::string to_json(const Config& config) {
  std::string text;
  for (const Key& key : config_keys()) {
    text += base::str(text.empty() ? "{" : ", ", show(key.name), ": ", show(key.write(config)));
  }
  return text + "}";
}

}  // namespace lamina::config
