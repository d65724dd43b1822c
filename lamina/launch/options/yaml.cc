// SPDX-License-Identifier: Apache-2.0
#include "lamina/launch/options/yaml.h"

#include <yaml-cpp/yaml.h>

#include <nlohmann/json.hpp>
#include <regex>

#include "lamina/base/error.h"
#include "lamina/base/str.h"

namespace lamina::launch {
namespace {

using Json = nlohmann::json;

Json scalar(const YAML::Node& node) {
  const std::string& text = node.Scalar();
  if (node.Tag() == "!") return text;  // in quotes
  if (text == "true" || text == "True" || text == "TRUE") return true;
  if (text == "false" || text == "False" || text == "FALSE") return false;
  static const std::regex number(R"([-+]?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)?)");
  if (!std::regex_match(text, number)) return text;
  const bool whole = text.find_first_of(".eE") == std::string::npos;
  try {
    return whole ? Json(std::stoll(text)) : Json(std::stod(text));
  } catch (const std::out_of_range&) {
    return text;
  }
}

Json convert(const YAML::Node& node) {
  if (node.IsScalar()) return scalar(node);
  Json result;
  if (node.IsSequence()) {
    result = Json::array();
    for (const auto& item : node) result.push_back(convert(item));
  } else if (node.IsMap()) {
    result = Json::object();
    for (const auto& entry : node) result[entry.first.Scalar()] = convert(entry.second);
  }
  return result;
}

}  // namespace

Json parse_yaml(const std::string& text, const std::string& source) {
  try {
    return convert(YAML::Load(text));
  } catch (const YAML::Exception& error) {
    throw base::ConfigError(base::str(source, " is not valid YAML: line ", error.mark.line + 1, ", column ",
                                      error.mark.column + 1, ": ", error.msg));
  }
}

}  // namespace lamina::launch
