// SPDX-License-Identifier: Apache-2.0
#include "lamina/plan/even_split.h"

#include <algorithm>
#include <limits>
#include <numeric>

namespace lamina::plan {
namespace {

constexpr double kImpossible = std::numeric_limits<double>::infinity();

bool fits(std::span<const std::int64_t> weights, std::size_t segments, std::int64_t limit) {
  std::size_t used = 1;
  std::int64_t sum = 0;
  for (std::int64_t weight : weights) {
    if (sum + weight > limit) {
      ++used;
      sum = 0;
    }
    sum += weight;
  }
  return used <= segments;
}

std::int64_t smallest_limit(std::span<const std::int64_t> weights, std::size_t segments) {
  std::int64_t low = *std::max_element(weights.begin(), weights.end());
  std::int64_t high = std::accumulate(weights.begin(), weights.end(), std::int64_t(0));
  while (low < high) {
    const std::int64_t middle = low + (high - low) / 2;
    if (fits(weights, segments, middle)) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low;
}

// The end of the first segment in the most even cut of a suffix of the weights into a number of segments.
struct Suffix {
  double spread = kImpossible;
  std::size_t end = 0;
};

// The suffixes cut into one number of segments, by their start: only those that can be cut so, which are few.
class Suffixes {
 public:
  Suffixes(std::size_t first, std::size_t last) : first_(first), suffixes_(last < first ? 0 : last - first + 1) {}

  Suffix& operator[](std::size_t start) { return suffixes_[start - first_]; }
  double spread(std::size_t start) const {
    return start < first_ || start - first_ >= suffixes_.size() ? kImpossible : suffixes_[start - first_].spread;
  }

 private:
  std::size_t first_ = 0;
  std::vector<Suffix> suffixes_;
};

// `after` are the suffixes cut into one segment less.
Suffix best_first_segment(std::span<const std::int64_t> weights, std::size_t start, std::int64_t limit,
                          const Suffixes& after) {
  Suffix best;
  std::int64_t sum = 0;
  for (std::size_t end = start + 1; end <= weights.size(); ++end) {
    sum += weights[end - 1];
    if (sum > limit) break;
    const double spread = static_cast<double>(sum) * static_cast<double>(sum) + after.spread(end);
    if (spread < best.spread) best = {spread, end};
  }
  return best;
}

// After each number of segments from the front, the most weights that these can hold.
std::vector<std::size_t> furthest(std::span<const std::int64_t> weights, std::size_t segments, std::int64_t limit) {
  std::vector<std::size_t> ends{0};
  for (std::size_t at = 0; ends.size() <= segments; ends.push_back(at)) {
    for (std::int64_t sum = 0; at < weights.size() && sum + weights[at] <= limit; ++at) sum += weights[at];
  }
  return ends;
}

// Where a segment may begin, by the number of segments before it, when all of them stay within the limit.
class Starts {
 public:
  Starts(std::span<const std::int64_t> weights, std::size_t segments, std::int64_t limit)
      : size_(weights.size()), segments_(segments), from_front_(furthest(weights, segments, limit)) {
    const std::vector<std::int64_t> reversed(weights.rbegin(), weights.rend());
    from_back_ = furthest(reversed, segments, limit);
  }

  std::size_t first(std::size_t before) const { return std::max(before, size_ - from_back_[segments_ - before]); }
  std::size_t last(std::size_t before) const { return std::min(size_ - (segments_ - before), from_front_[before]); }

 private:
  std::size_t size_;
  std::size_t segments_;
  std::vector<std::size_t> from_front_;
  std::vector<std::size_t> from_back_;
};

}  // namespace

EvenSplit split_evenly(std::span<const std::int64_t> weights, int segments) {
  const std::size_t size = weights.size();
  const std::size_t count = std::min(size, static_cast<std::size_t>(segments));
  EvenSplit split;
  if (count == 0) return split;
  split.largest = smallest_limit(weights, count);
  std::vector<Suffixes> best{{size, size}};  // by the number of segments
  best[0][size].spread = 0;
  const Starts starts(weights, count, split.largest);
  for (std::size_t left = 1; left <= count; ++left) {
    const std::size_t first = starts.first(count - left);
    const std::size_t last = starts.last(count - left);
    best.emplace_back(first, last);
    for (std::size_t start = first; start <= last; ++start) {
      best[left][start] = best_first_segment(weights, start, split.largest, best[left - 1]);
    }
  }
  split.spread = best[count].spread(0);
  for (std::size_t left = count, start = 0; left > 0; --left) {
    start = best[left][start].end;
    split.ends.push_back(start);
  }
  return split;
}

}  // namespace lamina::plan
