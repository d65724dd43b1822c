// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "lamina/base/ids.h"
#include "lamina/graph/segments.h"
#include "lamina/schedule/schedule.h"

namespace lamina::graph {

// A microbatch goes through a graph forward, and back.
enum class Direction : std::uint8_t { kForward, kBackward };

// The work of one rank for each microbatch: its segments in their order. The last one is the outside, see
// [Note: segments].
struct Program {
  // A value that goes between this rank and another.
  struct Passage {
    int value = 0;  // its number in the graph, alike on all ranks
    base::Rank other;
    bool gradient = false;  // comes back
  };
  struct Segment {
    std::string name;  // for errors: "level 2 (dense_3, dense_4)"
    std::vector<Passage> receives;
    std::vector<Passage> sends;
    bool makes_result = false;
  };

  std::int64_t graph = 0;         // its number, alike on all ranks
  std::string title;              // for errors: "a call of the model with float64 [4, 3]"
  std::vector<base::Rank> ranks;  // that run it
  std::vector<Segment> segments;
  std::vector<std::string> values;  // their names, for errors

  int outside() const { return static_cast<int>(segments.size()) - 1; }
  // The passages that a segment waits for before it begins, and those that it sends when it is over. A backward has
  // those of the forward the other way, as far as gradients come back.
  std::vector<Passage> awaited(Direction pass, int segment) const;
  std::vector<Passage> sent(Direction pass, int segment) const;
  // [Note: phases of segments] The first forward of a rank that needs no other rank starts the microbatch; other
  // forwards go on with it. The backward of a segment that makes a result begins the way back.
  schedule::Phase phase(Direction pass, int segment) const;
  // The rank has the slot from its last forward to the backward of it, with all that lies between: results and loss
  // need no other rank.
  bool keeps_slot_over_loss() const { return outside() > 0 && segments.back().receives.empty(); }
};

// The program of the rank that owns `partition`; `owners` are ranks by partition, `names` those of operations.
Program program_of(const GraphCut& cut, const std::vector<OperationOutput>& results, base::Partition partition,
                   const std::vector<base::Rank>& owners, const std::vector<std::string>& names,
                   const std::string& title = "a graph");

}  // namespace lamina::graph
