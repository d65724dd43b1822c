// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "lamina/plan/draft.h"

namespace lamina::plan {

// Both are deterministic, and end when they have looked at so many drafts.

// Moves and swaps single items while that makes the draft better.
void improve(Draft& draft, const Task& task, const Bounds& bounds, int drafts);

// Tries all owners of all items, without what cannot become better than `best`. Finds the best one when it is given
// enough drafts: for about ten items.
void search_all(Draft& best, const Task& task, const Bounds& bounds, int drafts);

}  // namespace lamina::plan
