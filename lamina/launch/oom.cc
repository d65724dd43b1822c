// SPDX-License-Identifier: Apache-2.0
#include "lamina/launch/oom.h"

#include <unistd.h>

#include <fstream>

namespace lamina::launch {
namespace {

std::string counter_file() {
  std::ifstream groups("/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {
    if (!line.starts_with("0::")) continue;
    std::string file = "/sys/fs/cgroup" + line.substr(3) + "/memory.events";
    if (::access(file.c_str(), R_OK) == 0) return file;
  }
  return "/proc/vmstat";
}

}  // namespace

OomCounter::OomCounter() : OomCounter(counter_file()) {}

OomCounter::OomCounter(std::string file) : file_(std::move(file)), before_(count()) {}

bool OomCounter::increased() const {
  const auto now = count();
  return before_ && now && *now > *before_;
}

std::optional<long> OomCounter::count() const {
  std::ifstream file(file_);
  std::string name;
  for (long value = 0; file >> name >> value;) {
    if (name == "oom_kill") return value;
  }
  return {};
}

}  // namespace lamina::launch
