// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace lamina::devices {

// A device by its name among all of its machine, such as "cuda:3". A launcher may show each process one device, with
// the number 0 in all of them: by `visible`, a list for this device's type, or nullptr.
std::string name_on_machine(at::Device device, const char* visible);

// Returns that of the rank's device.
std::string seat_name();

// The device that a rank computes on, by its machine and its name there; and all that the rank sees of its type.
struct Seat {
  std::int64_t machine = 0;
  std::string device;
  std::vector<std::string> seen;
};

// Returns that of this process's rank, which is on an accelerator.
Seat own_seat(int machine);

// True where two ranks compute on one device.
bool are_shared(std::span<const Seat> of_ranks);

// Words about ranks that share a device while they see another one that is idle; "" where none do.
std::string told_of_idle(std::span<const Seat> of_ranks);

// Ranks of this process's job share devices. Backends of collectives may refuse that.
bool shares_devices();
void set_shares_devices(bool shares);

}  // namespace lamina::devices
