// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace lamina::environment {

// The bytes of memory that processes here may still take: what the machine has, or what the control group of this
// process leaves, whichever is less. None where the system does not say. `root`: where /proc and /sys lie.
std::optional<std::int64_t> available_memory(const std::string& root = "");

}  // namespace lamina::environment
