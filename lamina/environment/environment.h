// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <optional>
#include <string>

namespace lamina::environment {

// The value of an environment variable; nothing when it is not set.
using Environment = std::function<std::optional<std::string>(const std::string& name)>;

// The environment of this process.
Environment process_environment();

// The number of cores that this process may use.
int available_cores();

}  // namespace lamina::environment
