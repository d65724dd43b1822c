// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "lamina/digests/measure.h"
#include "lamina/digests/recording.h"

namespace lamina::digests {

// A tensor that differs between two runs.
struct Difference {
  Seen seen;               // as the second run saw it
  std::int64_t copy = 0;   // of the model
  std::int64_t rank = -1;  // of the first run that saw it; -1 where several have parts of it
  double relative = 0;     // of the norm; infinite where it is no matter of size
  std::string what;        // "differs by 3e-2", "has shape [2, 3] instead of [3, 2]", "is called once instead of twice"
  bool inputs_agree = false;                  // of an output: those of the same call
  std::optional<Surroundings> first, second;  // of an output or its gradient: those of its call
  std::string reads;                          // in words: what distinguishes what its calls read, see reads_apart()
};

// The result for two runs.
struct Comparison {
  double tolerance = 0;
  std::int64_t steps = 0;    // that both have recorded
  std::int64_t wanted = 0;   // of them; 0: as many as there are
  std::int64_t tensors = 0;  // that were compared
  std::int64_t modules = 0;  // of which some were calls'
  std::int64_t parameters = 0;
  std::int64_t in_slices = 0;           // tensors of calls that were not compared: each rank had a slice
  double largest = 0;                   // relative difference among those that agree
  std::string largest_of;               // "output of layers.3"
  std::vector<Difference> differences;  // in the order of the second run's computation
  std::vector<std::string> missing;     // a sentence each: what one run has recorded and the other has not
};

// Compares what both have recorded. The second one's computation gives the order. Throws base::Error where they have
// nothing in common.
Comparison compare(const std::vector<RankRecording>& first, const std::vector<RankRecording>& second,
                   const ComparisonOptions& options);

// The comparison in words: one line where nothing differs, with what is missing; else the first difference, and a table
// of what follows.
std::string describe(const Comparison& comparison);

// "output of layers.3"
std::string named(const Seen& seen);

// "1 step", "2 steps"
std::string counted(std::int64_t number, std::string_view what);

}  // namespace lamina::digests
