// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "lamina/config/config.h"
#include "lamina/config/problems.h"

namespace lamina::config {

// Adds what the rules between keys find. A rule is left out when one of its keys already has a problem.
void check_between_keys(const Config& config, Problems& problems);

}  // namespace lamina::config
