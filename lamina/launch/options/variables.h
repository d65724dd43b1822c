// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "lamina/launch/options/environment.h"

namespace lamina::launch {

// `variables` with those that `assignments` set: NAME=VALUE, or NAME alone, which has to be set there already. Throws
// ConfigError on anything else, and on names that are the launcher's to set; `source` says where the assignments stand.
Variables with_variables(Variables variables, const std::vector<std::string>& assignments, const std::string& source);

}  // namespace lamina::launch
