// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "lamina/base/deadline.h"

namespace lamina::runtime {

// [Note: processor] A rank computes by turns in many threads, and all of them on the processor where it computed last:
// its caches know the model, and the other processors are other ranks'. Left alone, the system wakes the next thread
// beside a busy thread of another rank as often as not, and leaves the two there for ten milliseconds while a processor
// stands idle. It is a place to begin at and no more: should somebody else keep that processor busy, the system moves
// the thread, and the rank stays where it was moved to. A turn that is over in less time than the move takes warms no
// caches and counts for nothing. Where ranks leave processors to spare, no thread is moved: nothing is to be gained.
//
// Used by who has the compute slot alone.
class Processor {
 public:
  void leave();         // the calling thread has computed here
  void return_to_it();  // the calling thread is about to compute: it goes where the last one left
 private:
  int last_ = -1;
  base::Clock::time_point begin_;  // of the turn
};

}  // namespace lamina::runtime
