// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "lamina/plan/goal.h"
#include "lamina/plan/route.h"
#include "lamina/schedule/workload.h"

namespace lamina::plan {

// The work of one rank per microbatch.
struct RankLoad {
  double forward_us = 0;
  double backward_us = 0;
  double messages_us = 0;      // what messages of a forward take of it; those of a backward take as much
  std::int64_t out_bytes = 0;  // sent to other ranks by a forward

  double time_us() const { return forward_us + backward_us + 2 * messages_us; }
};

inline constexpr double kTicksPerMicrosecond = 1000;  // of a planned workload

// A route over the ranks that own its nodes.
struct PlannedWork {
  schedule::Workload workload;
  std::vector<RankLoad> loads;  // by rank
};

// [Note: planned work] A call of a module that lies elsewhere than its caller is a call of its own. What a rank
// computes in one call, with the modules that are called there, are pieces of it. Such calls are predicted: the caller
// goes on until it reads a value of one. The forward of a call begins when its caller has come to it and all values are
// there that are made outside of it and read in it. They come to its rank, and what it calls elsewhere is given them
// from there. Its results go straight to their readers, at its end. The backward is the same the other way: gradients
// of values that are read outside of a call come to its rank, those of what it reads go straight back. A caller's
// backward waits where it comes by a call that reads values of the caller's own. Where a call follows one on its rank,
// has the same caller, and alone reads what that one has made, both are one.
PlannedWork work_of(const Route& route, const Assignment& owners, const Goal& goal);

}  // namespace lamina::plan
