// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <ostream>
#include <string>
#include <vector>

namespace lamina::schedule {

// A step of several partitions, each computed by a team: one rank per pipeline.
struct TeamLayout {
  int partitions = 2;
  int members = 2;
  int microbatches = 4;
  int active = 3;
  std::string schedule = "interleaved";
  std::vector<int> first;  // member of each team

  friend std::ostream& operator<<(std::ostream& out, const TeamLayout& layout);
};

// Ways to decide whose turn it is.
enum class Order : std::uint8_t {
  kFree,         // each rank's own schedule decides
  kOfTheFirst,   // the first member of each team decides: see [Note: turns of a team]
  kReadsMayGoOn  // the same, but a thread keeps the slot where the value that it wants is there
};

// A layout of these sizes; the rest is drawn by the seed.
TeamLayout any_layout(int partitions, int members, std::uint64_t seed);

// Runs a step in simulated time: a program, durations and delays of messages drawn by the seed. Says that it ended, and
// did not hang.
bool step_ends(const TeamLayout& layout, Order order, std::uint64_t seed);

}  // namespace lamina::schedule
