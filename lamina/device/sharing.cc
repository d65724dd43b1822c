// SPDX-License-Identifier: Apache-2.0
#include "lamina/device/sharing.h"

#include <ATen/DeviceAccelerator.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <map>
#include <sstream>
#include <utility>
#include <vector>

#include "lamina/base/rank_list.h"
#include "lamina/base/str.h"
#include "lamina/device/rank_device.h"

namespace lamina::devices {
namespace {

std::atomic<bool> shares = false;

// The ranks of each device that has one, by machine and name.
std::map<std::pair<std::int64_t, std::string>, std::vector<base::Rank>> by_device(std::span<const Seat> of_ranks) {
  std::map<std::pair<std::int64_t, std::string>, std::vector<base::Rank>> found;
  std::int64_t rank = 0;
  for (const auto& seat : of_ranks) found[{seat.machine, seat.device}].emplace_back(rank++);
  return found;
}

std::string seat_name_of(at::Device device) {
  return name_on_machine(device, device.type() == at::kCUDA ? std::getenv("CUDA_VISIBLE_DEVICES") : nullptr);
}

}  // namespace

std::string name_on_machine(at::Device device, const char* visible) {
  std::string name = std::to_string(device.index());
  if (visible != nullptr) {
    std::istringstream names(visible);
    for (int i = 0; i <= device.index(); ++i) std::getline(names, name, ',');
  }
  return base::str(c10::DeviceTypeName(device.type(), /*lower_case=*/true), ":", name);
}

std::string seat_name() { return seat_name_of(rank_device()); }

Seat own_seat(int machine) {
  Seat own{machine, seat_name(), {}};
  for (c10::DeviceIndex number = 0; number < at::accelerator::deviceCount(); ++number) {
    own.seen.push_back(seat_name_of({rank_device().type(), number}));
  }
  return own;
}

bool are_shared(std::span<const Seat> of_ranks) { return by_device(of_ranks).size() < of_ranks.size(); }

std::string told_of_idle(std::span<const Seat> of_ranks) {
  const auto taken = by_device(of_ranks);
  for (const auto& [place, ranks] : taken) {
    if (ranks.size() == 1) continue;
    for (const auto& seen : of_ranks[static_cast<std::size_t>(ranks.front().value)].seen) {
      if (taken.contains({place.first, seen})) continue;
      return base::str(base::name_ranks(ranks), " compute on one device, ", place.second, ", while ", seen,
                       " of their machine is idle: leave `device` at \"auto\", or give each rank a "
                       "device of its own");
    }
  }
  return "";
}

bool shares_devices() { return shares; }
void set_shares_devices(bool are) { shares = are; }

}  // namespace lamina::devices
