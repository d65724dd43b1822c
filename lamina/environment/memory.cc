// SPDX-License-Identifier: Apache-2.0
#include "lamina/environment/memory.h"

#include <algorithm>
#include <fstream>
#include <limits>
#include <sstream>

namespace lamina::environment {
namespace {

std::optional<std::int64_t> number_in(const std::string& path) {
  std::ifstream file(path);
  std::int64_t number = 0;
  return file >> number ? std::optional(number) : std::nullopt;  // a limit may be "max"
}

std::optional<std::int64_t> of_machine(const std::string& root) {
  std::ifstream file(root + "/proc/meminfo");
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    std::string name;
    std::int64_t kib = 0;
    if (words >> name >> kib && name == "MemAvailable:") return kib * 1024;
  }
  return {};
}

// Finds the pages of files that the kernel would give back.
std::int64_t reclaimable(const std::string& path) {
  std::ifstream file(path);
  std::string name;
  std::int64_t bytes = 0;
  while (file >> name >> bytes) {
    if (name == "inactive_file") return bytes;
  }
  return 0;
}

// Asks one version of control groups: where a container sees its own as the root.
std::optional<std::int64_t> of_group(const std::string& folder, const char* limit_name, const char* used_name) {
  const auto limit = number_in(folder + limit_name), used = number_in(folder + used_name);
  if (!limit || !used) return {};
  return std::max<std::int64_t>(0, *limit - *used + reclaimable(folder + "memory.stat"));
}

}  // namespace

std::optional<std::int64_t> available_memory(const std::string& root) {
  constexpr auto kNone = std::numeric_limits<std::int64_t>::max();
  const auto groups = root + "/sys/fs/cgroup/";
  const auto least =
      std::min({of_machine(root).value_or(kNone), of_group(groups, "memory.max", "memory.current").value_or(kNone),
                of_group(groups + "memory/", "memory.limit_in_bytes", "memory.usage_in_bytes").value_or(kNone)});
  return least == kNone ? std::nullopt : std::optional(least);
}

}  // namespace lamina::environment
