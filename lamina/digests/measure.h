// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "lamina/digests/wholes.h"

namespace lamina::digests {

// How two runs are compared.
struct Terms {
  std::optional<double> tolerance;  // relative; else that of the numbers, see tolerance_of()
  bool bits = false;                // each element is to be the same
  std::int64_t steps = 0;           // that were wanted; 0: as many as there are
};

// [Note: tolerance] The largest difference that rounding explains, of the norm of a tensor: 1e-9 for float64, 1e-4 for
// float32, 2e-2 for float16 and 1e-1 for bfloat16. The coarsest numbers of a run give that of the whole run, for they
// flow into all others; but those of optimizers' states, which count steps in float32, only that of their own. A tensor
// far smaller than others of its kind is measured by those, since it may be no more than what rounding left of them. An
// optimizer that divides gradients by their size makes as much of such rounding as of any gradient. So a parameter may
// differ by a part of what has become of it since the beginning: by as many of its gradients' elements as were that
// small. Where a whole gradient was, as that of a bias before a softmax, the optimizer's states are not compared.
double tolerance_of(const Run& run);

// The norm of the difference, as far as digests tell.
double distance(const Digest& first, const Digest& second);

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
  Measure(const Parts& second, const Terms& terms, double tolerance);

  // The tensor is one that the second run has seen.
  Compared compare(const Digest& first, const Digest& second, const Seen& seen) const;

 private:
  using Group = std::tuple<std::int64_t, std::int64_t, Kind, std::string>;

  static Group group(const Seen& seen);
  double floor(const Seen& seen) const;
  bool is_noise(const Seen& seen) const;
  double amplified(const Seen& seen, const Digest& now) const;
  double change_of(const std::string& name, const std::vector<Whole>& now) const;
  void note_small(const Seen& seen, const std::vector<Part>& list);

  const Terms terms_;
  const double tolerance_;
  std::map<Group, double> largest_;
  std::map<std::string, double, std::less<>> small_;           // the largest share of elements, by the parameter's name
  std::map<std::string, double, std::less<>> smallest_share_;  // of a gradient in the largest one of its step
  std::map<std::int64_t, double> largest_change_;              // of a parameter, by the step
  std::map<std::string, std::vector<Part>, std::less<>> initial_;
};

}  // namespace lamina::digests
