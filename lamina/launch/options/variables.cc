// SPDX-License-Identifier: Apache-2.0
#include "lamina/launch/options/variables.h"

#include "lamina/base/error.h"
#include "lamina/base/str.h"

namespace lamina::launch {

Variables with_variables(Variables variables, const std::vector<std::string>& assignments, const std::string& source) {
  for (const std::string& assignment : assignments) {
    const std::string name = assignment.substr(0, assignment.find('='));
    if (name.empty()) throw base::ConfigError(base::str(source, " ", assignment, " has no name: write NAME=VALUE"));
    if (is_launchers(name)) {
      throw base::ConfigError(base::str(source, " ", name, " cannot be set: it is the launcher that sets it"));
    }
    if (assignment.size() == name.size()) {
      if (find(variables, name)) continue;
      throw base::ConfigError(base::str(source, " ", name, ": this variable is not set; write ", name, "=VALUE"));
    }
    std::erase_if(variables, [&](const std::string& entry) { return entry.starts_with(name + "="); });
    variables.push_back(assignment);
  }
  return variables;
}

}  // namespace lamina::launch
