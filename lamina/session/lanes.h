// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>

#include "lamina/device/lending.h"
#include "lamina/environment/environment.h"

namespace lamina::session {

// How the rank's device lends its memory to the transport; none where it does not, or where LAMINA_LANES is not 1. Says
// so where the device is what keeps it from that. Throws base::ConfigError for a value that is neither 0 nor 1.
std::optional<devices::Lending> asked_lending(const environment::Environment& environment);

}  // namespace lamina::session
