// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "lamina/digests/wholes.h"

namespace lamina::digests {

// [Note: rounding in updates] An optimizer that divides gradients by their size makes as much of an element that is no
// more than rounding as of any other one. So a parameter may differ by a part of what has become of it since the
// beginning: by as many of its gradients' elements as were that small. So may a state that is made of such updates. It
// is known by its elements, which are more alike in size than those of its first gradient. Other states have gradients
// or their squares in them, and differ no more than these. Where a whole gradient was rounding, as that of a bias
// before a softmax, states are not compared. Outputs of its own module may differ by what has become of it.
//
// Steps after such a difference go on from other parameters. Activations differ as much, those of an embedding more,
// since a few of its rows are looked up. Gradients differ by the root of that: a few units are then on the other side
// of zero.
class Rounding {
 public:
  Rounding(const RecordedParts& first, const RecordedParts& second, double tolerance);

  // True of a parameter, or an optimizer's state of one, of which a gradient was no more than rounding.
  bool is_noise(const Seen& seen) const;
  // Estimates what updates have made of rounding in a tensor of the second run.
  double amplified(const Seen& seen, const Digest& now) const;
  // How far a parameter had parted by rounding before this step, at most; 0 where all agreed.
  struct Parted {
    double relative = 0;  // of the largest parameter of its module
    double norm = 0;
  };
  Parted parted(std::int64_t step) const;
  // The norm of what parameters of a module, whose gradients were no more than rounding, have become in its output.
  double drifted(const Seen& output, const Digest& now) const;
  // The most that has become of a parameter between the beginning and the end of this step.
  double largest_change(std::int64_t step) const;

 private:
  // Elements of a parameter's gradients, at most or at least.
  struct Gradient {
    double small = 0;           // the largest share of elements that are small
    double share_of_norms = 1;  // the smallest one, of the largest gradient of the step
    double alike = 0;           // of the first one: its mean size in its largest element
    std::int64_t elements = 0;
  };

  void note_gradients(const RecordedParts& second);
  void note_states(const RecordedParts& second);
  void note_parted(const RecordedParts& first, const RecordedParts& second);
  double change_of(std::string_view parameter, const Digest& now) const;
  const Gradient* gradient_of(std::string_view parameter) const;

  const double tolerance_;
  std::map<std::string, Gradient, std::less<>> gradients_;  // by the parameter's name
  std::map<std::string, Digest, std::less<>> initial_;      // parameters before the first step
  std::set<std::string, std::less<>> made_of_updates_;      // states that are
  std::map<std::int64_t, Parted> parted_;
  std::map<std::int64_t, double> largest_change_;                              // by the step; the latter in it
  std::map<std::string, std::map<std::int64_t, double>, std::less<>> drifts_;  // an element's, by module and step
};

}  // namespace lamina::digests
