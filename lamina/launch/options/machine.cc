// SPDX-License-Identifier: Apache-2.0
#include "lamina/launch/options/machine.h"

#include <algorithm>
#include <filesystem>
#include <set>
#include <sstream>

#include "lamina/base/whole_number.h"

namespace lamina::launch {
namespace {

int present_gpus(const std::string& folder) {
  constexpr std::string_view kPrefix = "nvidia";
  std::error_code ignored;
  int count = 0;
  for (const auto& entry : std::filesystem::directory_iterator(folder, ignored)) {
    const std::string name = entry.path().filename();
    if (name.starts_with(kPrefix) && base::whole_number(name.substr(kPrefix.size()))) ++count;
  }
  return count;
}

// An index below `present`, or a GPU's identifier. An instance of a split GPU (MIG-...) is the only one CUDA shows.
bool names_one(const std::string& entry, int present) {
  if (entry.starts_with("GPU-") || entry.starts_with("MIG-")) return true;
  const auto index = base::whole_number(entry);
  return index && *index >= 0 && *index < present;
}

int listed(const std::string& list, int present) {
  std::set<std::string> seen;
  std::istringstream entries(list);
  for (std::string entry; std::getline(entries, entry, ',');) {
    std::erase(entry, ' ');
    if (!names_one(entry, present)) break;
    if (!seen.insert(entry).second) return 0;  // CUDA shows none when one is named twice
    if (entry.starts_with("MIG-")) return 1;
  }
  return std::min<int>(seen.size(), present);
}

}  // namespace

int visible_gpus(const environment::Environment& environment, const std::string& device_folder) {
  const int present = present_gpus(device_folder);
  const auto list = environment("CUDA_VISIBLE_DEVICES");
  return list ? listed(*list, present) : present;
}

}  // namespace lamina::launch
