// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "lamina/config/config.h"

namespace lamina::config {

// The configuration in the layout of a text, "pp=2,tp=1,shards=1,microbatches=4": keys with their values, those of the
// degrees under short names, too. What the text does not name stays. Throws ConfigError that names every part of the
// text that is wrong.
Config in_layout(Config config, const std::string& text);

}  // namespace lamina::config
