// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string_view>

#include "lamina/base/ids.h"

// The order in which the work of one rank gets to compute.
namespace lamina::schedule {

// The work that a waiting thread is about to do. On the rank that runs the step body, a microbatch passes through
// kStart, kForward, kBackwardStart and kBackward; serving ranks know only kForward and kBackward.
enum class Phase : std::uint8_t { kStart, kForward, kBackwardStart, kBackward };

struct Ticket {
  Phase phase = Phase::kForward;
  base::Microbatch microbatch;
  std::uint64_t arrival = 0;  // order in which the threads of this rank began to wait
};

// How far the step's microbatches are on this rank; a rank that only serves knows no more than who is ahead, and back.
struct Progress {
  int microbatches = 0;
  int started = 0;                       // left kStart
  int forward_done = 0;                  // reached kBackwardStart, or ended without a backward
  int finished = 0;                      // their step body ended
  std::set<base::Microbatch> ahead;      // have begun their forward here, and not come back to their backward
  std::optional<base::Microbatch> back;  // was the last in its backward here

  void go_on(const Ticket& picked);  // its thread computes from now on
};

// A schedule is a pure function: of the threads that wait, which computes next. Microbatches start in their order.
class Schedule {
 public:
  virtual ~Schedule() = default;
  // The position in `waiting` of the thread that goes on, or nothing when all have to wait for another event.
  virtual std::optional<std::size_t> pick(std::span<const Ticket> waiting, const Progress& progress) const = 0;
};

// All forwards, then all backwards. At most `active_microbatches` are in their forward at once.
std::unique_ptr<Schedule> simple_schedule(int active_microbatches);

// See [Note: two ahead]. At most `active_microbatches` are between the start of their forward and the end of their
// backward.
std::unique_ptr<Schedule> interleaved_schedule(int active_microbatches);

// By its configuration name, "simple" or "interleaved". Throws base::ConfigError for any other.
std::unique_ptr<Schedule> make_schedule(std::string_view name, int active_microbatches);

}  // namespace lamina::schedule
