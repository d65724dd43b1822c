// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>

#include "lamina/plan/candidate.h"

namespace lamina::plan {

using Scoring = std::function<Score(const Candidate&)>;

// Every one is deterministic; the first three end when they have looked at so many candidates.

// Moves and swaps single items while that makes the candidate better.
void improve(Candidate& candidate, const Problem& problem, const Scoring& scoring, int candidates);

// Cuts each partition and the next anew, in the order of the route and with either first, while that makes the
// candidate better. It should be contiguous.
void improve_cuts(Candidate& candidate, const Problem& problem, const Scoring& scoring, int candidates);

// Goes through the owners of all items, without what cannot become better than `best`: of a candidate in which somebody
// owns nothing the score has to be a lower bound. Finds the best one when it is given enough candidates: for about ten
// items.
void branch_and_bound(Candidate& best, const Problem& problem, const Scoring& scoring, int candidates);

// Looks at every candidate there is.
void try_all(Candidate& best, const Problem& problem, const Scoring& scoring);

}  // namespace lamina::plan
