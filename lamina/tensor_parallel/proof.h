// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>
#include <vector>

#include "lamina/tensor_parallel/team.h"

// [Note: proof of a plan] The members of a team run a module twice from the same inputs: as it is without slices, and
// with them. Values that both have are compared; those of the whole run are alike on all members. It follows from the
// verdicts whether code between and around sliced layers computes what the whole module does.
namespace lamina::tensor_parallel {

enum class Verdict {
  kAlike,      // all members have the whole value
  kPart,       // each has a part of it along a dimension, in the members' order
  kScattered,  // what each has along a dimension is in the whole value, in another order, or on several members
  kTerms,      // members' values add up to the whole one
  kZero,       // nothing but rounding, another on each member
  kAnother,
};

struct Compared {
  Verdict verdict = Verdict::kAnother;
  std::int64_t dim = 0;             // of parts
  std::vector<std::int64_t> sizes;  // of parts: each member's along the dimension
};

// A value of the whole run, and a member's own. What is smaller than `floor`, a root mean square, is taken for zero.
struct Twice {
  at::Tensor whole;
  at::Tensor own;
  double floor = 0;
};

// Collective over the team, whose members give as many values: what each member's own are of the whole ones, the same
// on all of them. `tolerance` is of norms, relative. A member may lack a value that others have: it is another then.
std::vector<Compared> compare(Team& team, std::span<const Twice> values, double tolerance);

}  // namespace lamina::tensor_parallel
