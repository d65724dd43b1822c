// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "lamina/plan/candidate.h"

namespace lamina::plan {

// Both are deterministic, and end when they have looked at so many candidates.

// Moves and swaps single items while that makes the candidate better.
void improve(Candidate& candidate, const Problem& problem, const Bounds& bounds, int candidates);

// Tries all owners of all items, without what cannot become better than `best`. Finds the best one when it is given
// enough candidates: for about ten items.
void search_all(Candidate& best, const Problem& problem, const Bounds& bounds, int candidates);

}  // namespace lamina::plan
