// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>

#include "lamina/plan/candidate.h"

namespace lamina::plan {

// The score of a candidate; where it does not beat the other one it may be a lower bound.
using Scoring = std::function<Score(const Candidate&, const Score& to_beat)>;

// Every one is deterministic; those that are given a number of candidates end when they have looked at so many.

// Moves and swaps single items while that makes the candidate better.
void improve(Candidate& candidate, const Problem& problem, const Scoring& scoring, int candidates);

// Cuts each partition and the next anew, in the order of the route and with either first, while that makes the
// candidate better. It should be contiguous.
void improve_cuts(Candidate& candidate, const Problem& problem, const Scoring& scoring, int candidates);

// Moves the cuts of a chain, first by many items, then by one, while that makes the candidate better. Whoever owns
// several stretches of it keeps them.
void shift_cuts(Candidate& candidate, const Problem& problem, const Scoring& scoring);

// Goes through the owners of all items, without what cannot become better than `best`: of a candidate in which somebody
// owns nothing the score has to be a lower bound. Finds the best one when it is given enough candidates: for about ten
// items.
void branch_and_bound(Candidate& best, const Problem& problem, const Scoring& scoring, int candidates);

// Looks at every cut of a chain into parts in the order of the partitions, of which the last may be where the root
// works.
void try_all_cuts(Candidate& best, const Problem& problem, const Scoring& scoring);

// Looks at every candidate there is.
void try_all(Candidate& best, const Problem& problem, const Scoring& scoring);

}  // namespace lamina::plan
