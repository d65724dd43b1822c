// SPDX-License-Identifier: Apache-2.0
#include "lamina/config/config_reader.h"

#include <map>
#include <nlohmann/json.hpp>
#include <utility>

#include "lamina/base/error.h"
#include "lamina/base/json_text.h"
#include "lamina/base/str.h"
#include "lamina/config/config_keys.h"
#include "lamina/config/json_reader.h"
#include "lamina/config/scalar.h"

namespace lamina::config {
namespace {

using base::Json;

Json parse_object(std::string_view text, std::string_view source) {
  Json json;
  try {
    json = base::parse_json(text);
  } catch (const Json::exception& error) {
    throw base::ConfigError(base::str(source, " is not valid JSON: ", json_reason(error)));
  }
  if (!json.is_object()) throw base::ConfigError(not_allowed(source, show(scalar_of(json)), "an object"));
  return json;
}

// Takes the parameters out of {"enabled": ..., "parameters": {...}}.
Json unwrap(const Json& json, bool& enabled, Problems& problems) {
  Json parameters = Json::object();
  for (const auto& [name, value] : json.items()) {
    if (name == "enabled" && value.is_boolean()) {
      enabled = value;
    } else if (name == "enabled") {
      problems.add(name, not_allowed(name, show(scalar_of(value)), "true or false"));
    } else if (name == "parameters" && value.is_object()) {
      parameters = value;
    } else if (name == "parameters") {
      problems.add(name, not_allowed(name, show(scalar_of(value)), "an object with the parameters"));
    } else {
      problems.add(
          name, base::str(name, ": ", show(scalar_of(value)), " is not allowed beside \"enabled\" and \"parameters\"; ",
                          "expected inside \"parameters\""));
    }
  }
  return parameters;
}

// Understands one written parameter after the other. `into` and `problems` must outlive it.
class ParameterReader {
 public:
  ParameterReader(ReadConfig& into, Problems& problems) : into_(into), problems_(problems) {}

  void read(const std::string& name, const Scalar& value);

 private:
  void accept(const Key& key, const std::string& name, const Scalar& value);

  ReadConfig& into_;
  Problems& problems_;
  std::map<std::string, std::pair<std::string, Scalar>> given_;  // by canonical name: name and value as first given
};

void ParameterReader::read(const std::string& name, const Scalar& value) {
  const Key* key = find_key(canonical_name(name));
  Config trial;
  if (is_tolerated(name)) {
    into_.tolerated += base::str(into_.tolerated.empty() ? "" : ", ", name);
  } else if (!key) {
    problems_.add(name, base::str(name, ": ", show(value), " is not allowed, there is no such key; the nearest is ",
                                  nearest_name(name)));
  } else if (!key->read(trial, value)) {
    problems_.add(key->name, not_allowed(name, show(value), key->allowed));
  } else {
    accept(*key, name, value);
  }
}

void ParameterReader::accept(const Key& key, const std::string& name, const Scalar& value) {
  const auto [first, fresh] = given_.emplace(key.name, std::pair(name, value));
  const auto& [first_name, first_value] = first->second;
  if (fresh) {
    key.read(into_.config, value);
    into_.given.push_back(key.name);
  } else if (first_value != value) {
    problems_.add(key.name, base::str(name, ": ", show(value), " is not allowed with ", first_name, ": ",
                                      show(first_value), "; they are two names of one key, expected the same value"));
  }
}

}  // namespace

ReadConfig read_config(std::string_view text, std::string_view source, Problems& problems) {
  const Json json = parse_object(text, source);
  ReadConfig result;
  const bool wrapped = json.contains("enabled") || json.contains("parameters");
  const Json parameters = wrapped ? unwrap(json, result.enabled, problems) : json;
  ParameterReader reader(result, problems);
  for (const auto& [name, value] : parameters.items()) reader.read(name, scalar_of(value));
  return result;
}

}  // namespace lamina::config
