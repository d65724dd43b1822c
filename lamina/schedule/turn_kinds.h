// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

namespace lamina::schedule {

// A microbatch computes on a rank, then goes to the next visit: its forward in this order, its backward back.
struct Visit {
  int rank = 0;
  std::int64_t forward = 1;  // time it computes
  std::int64_t backward = 1;
  std::int64_t message = 0;    // time between its end and the next visit of another rank; after the last, to rank 0
  bool backward_only = false;  // a forward does not come here: what would be handed on goes straight to the next visit
  std::int64_t weights = 0;    // the weight part of its backward, where that is split
};

// Kinds of turns: what they compute. A backward that is split has two, one for each part.
enum class TurnKind : std::uint8_t { kForward, kBackward, kWeights };

// Facts of a kind, for those who draw, count and simulate turns.
struct KindOfTurn {
  std::string_view name;                                 // on the timeline
  std::int64_t (*time)(const Visit& visit, bool split);  // of a visit; `split`: its microbatch's backward is
  bool (*frees)(bool split);                             // what the visit's forward has kept
};

inline constexpr std::array<KindOfTurn, 3> kKindsOfTurns{
    {{"forward", [](const Visit& visit, bool) { return visit.forward; }, [](bool) { return false; }},
     {"backward", [](const Visit& visit, bool split) { return visit.backward - (split ? visit.weights : 0); },
      [](bool split) { return !split; }},
     {"weights", [](const Visit& visit, bool) { return visit.weights; }, [](bool) { return true; }}}};

constexpr const KindOfTurn& about(TurnKind kind) { return kKindsOfTurns[static_cast<std::size_t>(kind)]; }

}  // namespace lamina::schedule
