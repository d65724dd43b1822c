// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "lamina/config/sources.h"
#include "lamina/environment/environment.h"

namespace lamina::verification {

// Reads what a program gave to init(), or the environment's words instead. In a run that `lamina verify` has started it
// is the configuration of that run: in the layout that the command names, or without any. Throws base::ConfigError as
// config::parse_sources().
config::GivenConfig read_configuration(const std::string& json, const environment::Environment& environment);

}  // namespace lamina::verification
