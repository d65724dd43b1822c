// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "lamina/schedule/turn_kinds.h"

// Events: what the ranks of a job did, and when.
namespace lamina::observe {

enum class What : std::uint8_t {
  kForward,     // module `name`, or a step body when it is empty, computed
  kBackward,    // the same in its backward, or the input part of one that is split
  kWeights,     // the same in the weight part
  kWait,        // a thread waited for `name`, a clause
  kSend,        // a message of `bytes` was given to rank `peer`
  kReceive,     // a message of rank `peer` arrived
  kMemory,      // this process held `bytes`, at `begin_ns`
  kStep,        // this rank was in `step`
  kCollective,  // `name`, on `bytes` of tensors, was under way: from its start until it was done, or given up
};
constexpr What kLastWhat = What::kCollective;

// Turns come first, in the order of their kinds.
constexpr What what_of(schedule::TurnKind kind) { return static_cast<What>(kind); }
constexpr bool is_turn(What what) { return static_cast<std::size_t>(what) < schedule::kKindsOfTurns.size(); }

struct Event {
  What what = What::kForward;
  std::int64_t begin_ns = 0;  // of the steady clock
  std::int64_t end_ns = 0;
  std::int64_t step = -1;
  std::int64_t microbatch = -1;
  std::string name;
  std::int64_t peer = -1;
  std::int64_t bytes = 0;
  std::uint64_t message = 0;  // the same for its kSend and its kReceive

  friend bool operator==(const Event&, const Event&) = default;
};

// The events of one rank.
struct RankRecord {
  std::int64_t rank = 0;
  std::int64_t leader = 0;    // the rank that runs the step bodies of its pipeline
  std::int64_t ahead_ns = 0;  // how far its clock is ahead of rank 0's
  std::int64_t dropped = 0;   // events for which there was no room
  std::vector<Event> events;

  friend bool operator==(const RankRecord&, const RankRecord&) = default;
};

// The events of some ranks of a job, and the schedule that they followed.
struct Timeline {
  std::string schedule = "interleaved";
  std::int64_t active_microbatches = 1;
  std::vector<RankRecord> ranks;

  friend bool operator==(const Timeline&, const Timeline&) = default;
};

}  // namespace lamina::observe
