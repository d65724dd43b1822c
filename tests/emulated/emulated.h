// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

// An accelerator that is not there: torch's device type PrivateUse1 under the name "emulated", for tests of what is
// true of all accelerators. Loading this library makes the devices known to torch.
//
// A stream is a thread, and the host runs ahead of it. Tensors point where the host may not read. Memory that is freed
// holds NaNs. A kernel that fails is told by a later call. [Note: settings] in settings.h lists what can be set.
namespace emulated {

struct Counts {
  std::uint64_t enqueued = 0;  // operations and copies after which the host went on at once
  std::uint64_t drained = 0;   // operations before which the host waited for the stream, for want of a shape
  std::uint64_t waits = 0;  // times that a host thread waited for a device: synchronizations, numbers, blocking copies
  std::vector<std::size_t> bytes, peak_bytes;   // by device
  std::vector<int> contexts;                    // devices that something was done with
  std::map<std::string, std::uint64_t> drains;  // the drained operations, by name
};

Counts counts();

// Counts from zero; the peaks become what is allocated now. What was touched stays touched.
void reset_counts();

}  // namespace emulated
