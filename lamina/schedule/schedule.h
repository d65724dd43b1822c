// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string_view>

#include "lamina/base/ids.h"
#include "lamina/schedule/turn_kinds.h"

// The order in which the work of one rank gets to compute.
namespace lamina::schedule {

// The work that a waiting thread is about to do. On the rank that runs the step body, a microbatch passes through all
// of them; serving ranks know only kForward, kBackward and kWeights. That is the weight part of a backward that is
// split ([Note: parts of a backward] in remote/split_backward.h), of which kBackward is the input part.
enum class Phase : std::uint8_t { kStart, kForward, kBackwardStart, kBackward, kWeights };

// The kind of the turn that a thread in this phase gets.
constexpr TurnKind kind_of(Phase phase) {
  if (phase == Phase::kWeights) return TurnKind::kWeights;
  return phase == Phase::kBackward ? TurnKind::kBackward : TurnKind::kForward;
}

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
  // The first microbatch of so many from which on backwards are split; as many as there are: none is.
  virtual int first_split(int microbatches) const { return microbatches; }
};

// All forwards, then all backwards. At most `active_microbatches` are in their forward at once.
std::unique_ptr<Schedule> simple_schedule(int active_microbatches);

// See [Note: two ahead]. At most `active_microbatches` are between the start of their forward and the end of their
// backward.
std::unique_ptr<Schedule> interleaved_schedule(int active_microbatches);

// An interleaved schedule in which the last backwards of a step are split. Their weight parts come when there is
// nothing else to do: they fill the time in which the pipeline drains. Until these are over a microbatch counts as
// active.
std::unique_ptr<Schedule> zero_bubble_schedule(int active_microbatches, int partitions);

// By its configuration name: "simple", "interleaved" or "zero_bubble". Throws base::ConfigError for any other.
std::unique_ptr<Schedule> make_schedule(std::string_view name, int active_microbatches, int partitions = 1);

}  // namespace lamina::schedule
