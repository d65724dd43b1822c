// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "lamina/digests/comparison.h"

namespace lamina::digests {

// Says what distinguishes the two calls that made an output which differs although its inputs agree: of their modes and
// random numbers, or of what they read, where that was recorded. Begins with a colon or a semicolon; empty where
// nothing is known.
std::string cause_of(const Difference& difference);

// Calls whose code may have computed this difference, the first of all, the likeliest ones first. An output comes from
// the module itself, where its inputs agree; an input from the module around it. A gradient of an output comes from
// modules that took the output, or from the one around; that of a parameter from its module. An update has the name of
// its parameter, and no microbatch.
std::vector<CallName> calls_to_look_at(const Difference& difference, const std::vector<RankRecording>& run);

// Says what these calls read in one run that they do not find in the other: the first of them that does. The numbers in
// it may differ by the tolerance. Empty where nobody has recorded it.
std::string reads_apart(const std::vector<RankRecording>& first, const std::vector<RankRecording>& second,
                        const Difference& difference, const std::vector<CallName>& calls, double tolerance);

// Says what the recordings lack, a sentence each: ranks that left none, ones that were killed, or whose disk was full.
std::vector<std::string> gaps(const std::vector<RankRecording>& run, const std::string& name);

}  // namespace lamina::digests
