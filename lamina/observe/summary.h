// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>
#include <string>
#include <vector>

#include "lamina/observe/event.h"

namespace lamina::observe {

// The work of one rank in the steps of a timeline.
struct RankSummary {
  std::int64_t rank = 0;
  std::int64_t step_ns = 0;     // it was in a step
  std::int64_t compute_ns = 0;  // of which it computed
  // Why it did not compute, each with its time: "waiting for rank 2", "start of the step", "end of the step", "between
  // two turns of its own".
  std::map<std::string, std::int64_t> idle_ns;
  std::int64_t messages = 0;  // sent
  std::int64_t bytes = 0;     // sent
  std::int64_t peak_bytes = 0;
  std::int64_t dropped = 0;

  double bubble() const {
    return step_ns == 0 ? 0 : 1 - static_cast<double>(compute_ns) / static_cast<double>(step_ns);
  }
};

struct ModuleSummary {
  std::string name;
  std::int64_t rank = 0;
  std::int64_t forward_ns = 0;
  std::int64_t backward_ns = 0;
  std::int64_t total_ns() const { return forward_ns + backward_ns; }
};

struct Summary {
  std::int64_t steps = 0;
  std::int64_t step_ns = 0;     // median, on the ranks that lead
  std::int64_t planned_ns = 0;  // the same with neither waits nor messages; 0: unknown
  double bubble = 0;            // mean of the ranks
  std::vector<RankSummary> ranks;
  std::vector<ModuleSummary> modules;  // the slowest first
};

// A summary of all steps but the first, which traces, cuts and warms up, where there are several.
Summary summarise(const Timeline& timeline);

// As a table; ends with a newline.
std::string describe(const Summary& summary);

}  // namespace lamina::observe
