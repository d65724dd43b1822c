// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "lamina/observe/event.h"

namespace lamina::observe {

// The turns of a rank under the job's schedule, in the clock of rank 0, if messages took no time. Everything else takes
// the time that it took on average in that step. Steps whose course is unknown have none: no module of another rank was
// called, or the leader's events were dropped.
struct PlannedEvent {
  std::int64_t rank = 0;
  Event event;
};
std::vector<PlannedEvent> planned_events(const Timeline& timeline);

}  // namespace lamina::observe
