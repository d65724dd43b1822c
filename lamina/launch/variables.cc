// SPDX-License-Identifier: Apache-2.0
#include "lamina/launch/variables.h"

#include <algorithm>

#include "lamina/base/error.h"
#include "lamina/base/str.h"

namespace lamina::launch {
namespace {

bool sets(const std::string& entry, const std::string& name) {
  return entry.size() > name.size() && entry.starts_with(name) && entry[name.size()] == '=';
}

}  // namespace

Environment with_variables(Environment environment, const std::vector<std::string>& assignments,
                           const std::string& source) {
  for (const std::string& assignment : assignments) {
    const std::string name = assignment.substr(0, assignment.find('='));
    if (name.empty()) throw base::ConfigError(base::str(source, " ", assignment, " has no name: write NAME=VALUE"));
    if (is_launchers(name)) {
      throw base::ConfigError(base::str(source, " ", name, " cannot be set: it is the launcher that sets it"));
    }
    const auto has_name = [&](const std::string& entry) { return sets(entry, name); };
    if (assignment.size() == name.size()) {
      if (std::ranges::any_of(environment, has_name)) continue;
      throw base::ConfigError(base::str(source, " ", name, ": this variable is not set; write ", name, "=VALUE"));
    }
    std::erase_if(environment, has_name);
    environment.push_back(assignment);
  }
  return environment;
}

}  // namespace lamina::launch
