// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "lamina/config/problems.h"
#include "lamina/config/scalar.h"

namespace lamina::config {

// A configuration as it was written, its keys sorted and not yet understood.
struct WrittenConfig {
  std::vector<std::pair<std::string, Scalar>> parameters;
  bool enabled = true;
};

// Reads both shapes of a configuration. Text that is not a JSON object throws ConfigError, with its position;
// everything else that is wrong goes to `problems`. `source` names the text in messages.
WrittenConfig read_written(std::string_view json, std::string_view source, Problems& problems);

}  // namespace lamina::config
