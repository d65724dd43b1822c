// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>

namespace emulated {

// [Note: settings] The environment, read once:
//   EMULATED_DEVICES    how many there are (4)
//   EMULATED_DELAY_US   the longest time that a stream sleeps before each task (0)
//   EMULATED_SEED       draws those times (0)
//   EMULATED_MEMORY     bytes of each device (64 GiB)
//   EMULATED_IGNORE     "waits": streams wait for no event. "record_stream": memory is reused as if no other stream had
//                       it. Programs that need these then go wrong, which shows that a test would notice.
struct Settings {
  int devices = 4;
  long delay_us = 0;
  unsigned long seed = 0;
  std::size_t memory = std::size_t(64) << 30;
  bool ignores_waits = false;
  bool ignores_record_stream = false;
};

inline constexpr int kMostDevices = 16;

// Throws std::invalid_argument, naming the variable, if one holds what it cannot.
const Settings& settings();

}  // namespace emulated
