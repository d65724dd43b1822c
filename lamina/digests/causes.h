// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "lamina/digests/comparison.h"

namespace lamina::digests {

// Says what distinguishes the two calls that made an output which differs although its inputs agree: of their modes and
// random numbers, or of what they read, where that was recorded. Begins with a colon or a semicolon; empty where
// nothing is known.
std::string cause_of(const Difference& difference);

// The call whose code has computed this difference, the first of all: of an output that of the module itself, where its
// inputs agree; of an input that of the module around it.
std::optional<CallName> call_to_look_at(const Difference& difference, const std::vector<RankRecording>& run);

// Says what that call reads in one run that it does not find in the other. The numbers in it may differ by the
// tolerance. Empty where nobody has recorded it.
std::string reads_apart(const std::vector<RankRecording>& first, const std::vector<RankRecording>& second,
                        const Difference& difference, const CallName& call, double tolerance);

// Says what the recordings lack, a sentence each: ranks that left none, ones that were killed.
std::vector<std::string> gaps(const std::vector<RankRecording>& run, const std::string& name);

}  // namespace lamina::digests
