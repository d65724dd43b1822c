// SPDX-License-Identifier: Apache-2.0
#include "lamina/environment/environment.h"

#include <cstdlib>

namespace lamina::environment {

Environment process_environment() {
  return [](const std::string& name) -> std::optional<std::string> {
    const char* value = std::getenv(name.c_str());
    return value ? std::optional<std::string>(value) : std::nullopt;
  };
}

}  // namespace lamina::environment
