// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "lamina/digests/measure.h"
#include "lamina/digests/wholes.h"

namespace lamina::digests {

// [Note: matched calls] Calls of a module in a microbatch have numbers. Where several modules call it, or it runs on
// several ranks, those of one run need not be those of another one: calls that do not depend on each other have no
// order. And where a call goes to another rank, tensors in objects, such as caches, are seen among its inputs.

// Matches calls of two runs: by equal inputs first, then by the nearest gradients of their outputs. A call that matches
// no other takes a number that is left.
RecordedParts matched(const RecordedParts& first, const RecordedParts& second, const Measure& measure);

}  // namespace lamina::digests
