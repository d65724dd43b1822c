// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "lamina/schedule/turn_kinds.h"

// The work of a step, for its simulation.
namespace lamina::schedule {

// The end of another piece's pass, and a message of it. `time` is that of the message, between pieces of two ranks.
struct Need {
  int piece = 0;
  std::int64_t time = 0;
};

// Work of a microbatch that a rank does without waiting. It is all of a call of a module, or of the step body, or so
// much of it as lies between two waits or calls of modules elsewhere. Of `work`, `message` does not count.
struct Piece {
  Visit work;
  int before = -1;  // the piece of the same call that comes before it in the forward, and after it in the backward
  std::vector<Need> forward_needs = {};   // beside that one
  std::vector<Need> backward_needs = {};  // beside the one that comes after it in the forward
};

// [Note: workload] All microbatches of a step compute the same pieces. The first piece begins the step body, on rank 0;
// the last one is the loss, where the body turns from forward to backward. A call goes on past those that it makes, as
// lamina's callers do where they know what comes back ([Note: prediction] in remote/call_profile.h), until it needs a
// value of one. So several ranks may compute one microbatch at once. When a piece ends, and the next one of its call
// needs nothing that is not there, that begins at once; else it waits for its needs, and then for its turn. The weight
// parts of a split backward are one turn for each call, after its input part.
struct Workload {
  std::vector<Piece> pieces;
  int microbatches = 1;
  std::function<std::int64_t()> delay = [] { return 0; };  // of each message, beside its own time
  double jitter = 0;       // turns take between 1 - jitter and 1 + jitter of their time, by chance
  std::uint64_t draw = 0;  // of that chance
};

// A step over a chain. Rank 0 starts the microbatches and calls all modules of each at once. The outputs go straight
// from each visit to the next, and from the last one to rank 0, which has the loss. Gradients go back the same way. A
// last visit of rank 0, the loss, and the beginning of the backward there, are one piece: the step body goes on.
struct Chain {
  std::vector<Visit> visits;  // the first is on rank 0; those on rank 0 are the step body's, others a call each
  int microbatches = 1;
  std::function<std::int64_t()> delay = [] { return 0; };
};

// A piece for each visit, in this order, and one for the loss.
Workload workload_of(const Chain& chain);

// As many visits as stages, one on each rank, all alike. `weights` is the weight part of a backward; the whole of it
// where nobody waits for a gradient, at the first visit.
Chain even_chain(int stages, int microbatches, std::int64_t forward = 1, std::int64_t backward = 1,
                 std::int64_t weights = 0);

}  // namespace lamina::schedule
