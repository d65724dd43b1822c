// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <string_view>

#include "lamina/observe/event.h"

// Names that the writer and the reader of a file agree on.
namespace lamina::observe {

// The categories of the events, by What: those of turns have the names of their kinds.
constexpr auto kCategories = [] {
  std::array<std::string_view, static_cast<std::size_t>(kLastWhat) + 1> names{
      "", "", "", "wait", "send", "receive", "memory", "step", "collective"};
  for (std::size_t i = 0; i < schedule::kKindsOfTurns.size(); ++i) names[i] = schedule::kKindsOfTurns[i].name;
  return names;
}();
static_assert(!kCategories.back().empty() && is_turn(What::kWeights) && !is_turn(What::kWait));

// The rows of a rank are as its threads: row r has the lanes r * kLanes and following, so that slices of one never
// overlap. None is 0, which Perfetto takes for the idle thread of the system.
enum Row : int { kSteps = 1, kCompute, kPlanned, kMessages, kCollectives };
constexpr std::array<std::string_view, 6> kRows = {"", "steps", "compute", "planned", "messages", "collectives"};
constexpr int kLanes = 1000;

constexpr std::string_view kBody = "step body";  // the name of what is no module

}  // namespace lamina::observe
