// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "lamina/config/config.h"
#include "lamina/config/problems.h"

namespace lamina::config {

// A configuration as its text says it, before rules between keys and before defaults.
struct ReadConfig {
  Config config;          // a key with a problem keeps its default
  std::string tolerated;  // the tolerated keys, as "fast_mode, static_mode"; often empty
  bool enabled = true;
  std::vector<std::string> given;  // the keys that it says, by their canonical names
};

// Reads both shapes of a configuration. Text that is not a JSON object throws ConfigError, with its position;
// everything else that is wrong goes to `problems`. `source` names the text in messages.
ReadConfig read_config(std::string_view json, std::string_view source, Problems& problems);

}  // namespace lamina::config
