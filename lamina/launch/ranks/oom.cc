// SPDX-License-Identifier: Apache-2.0
#include "lamina/launch/ranks/oom.h"

#include <unistd.h>

#include <fstream>

namespace lamina::launch {
namespace {

// A line is number:controllers:path; version 2 has no controllers.
std::string counter_file() {
  std::ifstream groups("/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {
    const auto controllers = line.find(':') + 1;
    const auto path = line.find(':', controllers) + 1;
    const std::string name = line.substr(controllers, path - 1 - controllers);
    std::string file;
    if (name.empty()) file = "/sys/fs/cgroup" + line.substr(path) + "/memory.events";
    if (name == "memory") file = "/sys/fs/cgroup/memory" + line.substr(path) + "/memory.oom_control";
    if (!file.empty() && ::access(file.c_str(), R_OK) == 0) return file;
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
