// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace lamina::plan {

// A sequence of weights cut into contiguous, non-empty segments.
struct EvenSplit {
  std::vector<std::size_t> ends;  // per segment, the position after its last weight
  std::int64_t largest = 0;       // the sum of the heaviest segment
  double spread = 0;              // the sum of squares of the segments' sums: the smaller the more even
};

// The cut into min(segments, weights) segments whose largest is smallest; of those the most even one, and of those the
// one that cuts earliest. Takes O(segments * weights * longest segment), and less the tighter it is.
EvenSplit split_evenly(std::span<const std::int64_t> weights, int segments);

}  // namespace lamina::plan
