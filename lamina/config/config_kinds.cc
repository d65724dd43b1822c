// SPDX-License-Identifier: Apache-2.0
#include "lamina/config/config_kinds.h"

namespace lamina::config {
namespace {

bool is_placement(std::string x) {
  if (x == "cluster" || x == "spread") return true;
  std::sort(x.begin(), x.end());
  return x == "DPT";
}

}  // namespace

Key flag(std::string name, bool Config::* field) {
  const auto same = [](bool x) { return std::optional(x); };
  return key_of<bool>(std::move(name), "true or false", field, same, [](bool x) { return x; });
}

Key text(std::string name, std::optional<std::string> Config::* field) {
  const auto same = [](const std::string& x) { return std::optional(x); };
  return key_of<std::string>(std::move(name), "a string", field, same, [](const std::string& x) { return x; });
}

Key placement(std::string name, std::string Config::* field) {
  const auto convert = [](const std::string& x) { return is_placement(x) ? std::optional(x) : std::nullopt; };
  return key_of<std::string>(std::move(name), "\"cluster\", \"spread\" or the letters D, P and T in any order", field,
                             convert, [](const std::string& x) { return x; });
}

}  // namespace lamina::config
