// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <span>
#include <string>
#include <vector>

#include "lamina/layout/parameter_layout.h"
#include "lamina/session/session.h"
#include "lamina/tensor_parallel/proof.h"
#include "lamina/tensor_parallel/same_batch.h"

namespace lamina::session {

// A parameter that is whole, and how it is to be cut over a TP_GROUP.
struct ToSlice {
  std::string name;
  at::Tensor tensor;
  layout::Slicing slicing;
};

// Collective over the world: gives parameters the values that they have on the first rank, and leaves each rank its
// slices of them, in the same tensors. `make` is called before values of some are read, with these. Parameters that
// were put aside, whose values are to come, have the shapes of their slices from then on. Throws base::UsageError where
// ranks are to slice others, and what model::give_values() throws.
void slice(Session& session, std::span<const ToSlice> parameters,
           const std::function<void(std::span<const at::Tensor>)>& make);

// Runs a step, of a rank that may have slices: where one of those with the others fails, all of them do.
void run_step(Session& session, pipeline::StepSpec spec, const std::function<void(pipeline::StepSpec)>& run);

// A call of the model begins on a rank that has slices. The ranks of a TP_GROUP compare what they were given as they
// next compute together: see [Note: given alike].
void note_call(Session& session, const tensor_parallel::ModelCall& call);

// The whole of this rank's slice, and of the other members' of its team; collective over that.
at::Tensor whole_of(Session& session, const at::Tensor& slice, const layout::Slicing& slicing);

// Compares members' own values with whole ones, see tensor_parallel::compare(); collective over the TP_GROUP.
std::vector<tensor_parallel::Compared> compare_slices(Session& session, std::span<const tensor_parallel::Twice> values,
                                                      double tolerance);

// This rank's slice of a whole.
at::Tensor slice_of(Session& session, const at::Tensor& whole, const layout::Slicing& slicing);

}  // namespace lamina::session
