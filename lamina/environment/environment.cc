// SPDX-License-Identifier: Apache-2.0
#include "lamina/environment/environment.h"

#include <sched.h>

#include <algorithm>
#include <cstdlib>
#include <thread>

namespace lamina::environment {

Environment process_environment() {
  return [](const std::string& name) -> std::optional<std::string> {
    const char* value = std::getenv(name.c_str());
    return value ? std::optional<std::string>(value) : std::nullopt;
  };
}

int available_cores() {
  cpu_set_t set;
  if (::sched_getaffinity(0, sizeof set, &set) == 0) return CPU_COUNT(&set);
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));  // more cores than the set has room for
}

}  // namespace lamina::environment
