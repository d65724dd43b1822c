// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>

#include <optional>
#include <string>

#include "lamina/layout/region.h"
#include "lamina/tensor_parallel/layer_cuts.h"

namespace lamina::tensor_parallel {

// [Note: dropout of slices] Random numbers are drawn for all of a tensor of which each member of a team has a part, on
// every member, and each uses those of its own. So the numbers are those of the whole, and the members' generators,
// which have the same state, stay alike. It is an operator of torch's dispatcher, too: `torch.ops.lamina.tp_dropout`.

// Dropout, with probability `p`, of the part `here` of `all` positions along a dimension.
at::Tensor dropout_of_part(const at::Tensor& part, double p, std::int64_t dim, const layout::Share& here,
                           std::int64_t all);
at::Tensor dropout_of_part(const at::Tensor& part, double p, std::int64_t dim, c10::SymInt first, c10::SymInt own,
                           c10::SymInt all);

// Notes, in programs in C++, what lies in parts between layers that plans cut: this thread has been given these
// features by one, in a module of which it has these heads. From the first of these on torch's dropout of such parts is
// that of the whole.
void note_given(const SlicePart& features, const std::optional<SlicePart>& heads);
// A layer has taken what this thread was given.
void note_taken();
// The copy of what a layer is given, see copy() in operators.h; until note_taken() one for all that are given the same.
at::Tensor copied(const at::Tensor& given, const std::string& team);

}  // namespace lamina::tensor_parallel
