// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <tuple>

#include "lamina/digests/rounding.h"

namespace lamina::digests {

// How two runs are compared.
struct ComparisonOptions {
  std::optional<double> tolerance;  // relative; else that of the numbers, see tolerance_of()
  bool bits = false;                // each element is to be the same
  std::int64_t steps = 0;           // that were wanted; 0: as many as there are
};

// [Note: tolerance] The largest difference that rounding explains, of the norm of a tensor: 1e-9 for float64, 1e-4 for
// float32, 2e-2 for float16 and 1e-1 for bfloat16. The coarsest numbers of a run give that of the whole run, for they
// flow into all others; but those of optimizers' states, which count steps in float32, only that of their own. A tensor
// far smaller than others of its kind is measured by those, since it may be no more than what rounding left of them.
// Rounding that updates have made larger comes on top: see [Note: rounding in updates].
double tolerance_of(const RankRecordings& run);

// A relative difference in words: "3e-02".
std::string size_text(double relative);

// The result for one tensor.
struct Compared {
  double relative = 0;
  std::string what;  // "" where they agree
};

// Compares tensors of two runs by [Note: tolerance], with the sizes of the second one's.
class Measure {
 public:
  Measure(const RecordedParts& first, const RecordedParts& second, const ComparisonOptions& options, double tolerance);

  // The tensor is one that the second run has seen.
  Compared compare(const Digest& first, const Digest& second, const Seen& seen) const;

 private:
  using Group = std::tuple<std::int64_t, std::int64_t, RecordedKind, std::string>;

  static Group group(const Seen& seen);
  double floor(const Seen& seen) const;
  double tolerated(const Digest& digest, const Seen& seen, double scale) const;

  const ComparisonOptions terms_;
  const double tolerance_;
  const Rounding rounding_;
  std::map<Group, double> largest_;
  std::map<std::string, double, std::less<>> inputs_;  // the mean size of elements in the largest input of a module
};

}  // namespace lamina::digests
