// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <string_view>

#include "lamina/observe/event.h"

// Names that the writer and the reader of a file agree on.
namespace lamina::observe {

// The categories of the events, by What.
constexpr auto kCategories =
    std::to_array<std::string_view>({"forward", "backward", "wait", "send", "receive", "memory", "step", "collective"});
static_assert(kCategories.size() == static_cast<std::size_t>(kLastWhat) + 1);

// The rows of a rank are as its threads: row r has the lanes r * kLanes and following, so that slices of one never
// overlap. None is 0, which Perfetto takes for the idle thread of the system.
enum Row : int { kSteps = 1, kCompute, kPlanned, kMessages, kCollectives };
constexpr std::array<std::string_view, 6> kRows = {"", "steps", "compute", "planned", "messages", "collectives"};
constexpr int kLanes = 1000;

constexpr std::string_view kBody = "step body";  // the name of what is no module

}  // namespace lamina::observe
