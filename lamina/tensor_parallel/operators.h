// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "lamina/tensor_parallel/team.h"

// [Note: operators of slices] Exchanges of a layer, whose parameters are cut over a team, with its other members. Each
// is an operator of torch's dispatcher as well (`torch.ops.lamina.tp_all_reduce`, ...), which compiled graphs have
// whole, with shapes for tensors without values. Gradients follow from what the members have, a whole that is alike on
// all of them or parts of one:
//
//   name               takes               gives                its gradient, backwards
//   tp_copy            a whole             the same             tp_all_reduce: each has used it for its own part
//   tp_all_reduce      terms of a sum      the sum, alike       tp_copy
//   tp_gather          parts               the whole, alike     tp_scatter
//   tp_scatter         a whole, alike      its part             tp_gather
//   tp_all_gather      parts               the whole            tp_reduce_scatter: each uses it for its own part
//   tp_reduce_scatter  terms of a sum      its part of the sum  tp_all_gather
//   tp_all_to_all      all of one cut, and its part of another  tp_all_to_all, back
//
// So a layer cut over its outputs begins with tp_copy and one cut over its inputs ends with tp_all_reduce; where
// activations lie in parts in between, tp_all_gather and tp_reduce_scatter take their places. A gradient is never
// summed twice.
//
// All throw what Team's functions throw. `team` is a name given to note_team().
namespace lamina::tensor_parallel {

// A layer's own slice, to compute with: see [Note: guarded slices]. Not defined where the slice is not.
at::Tensor own(const at::Tensor& slice);
at::Tensor copy(const at::Tensor& whole, const std::string& team);
at::Tensor all_reduce(const at::Tensor& given, const std::string& team);
at::Tensor gather(const at::Tensor& part, const Cut& cut, const std::string& team);
at::Tensor scatter(const at::Tensor& whole, const Cut& cut, const std::string& team);
at::Tensor all_gather(const at::Tensor& part, const Cut& cut, const std::string& team);
at::Tensor reduce_scatter(const at::Tensor& given, const Cut& cut, const std::string& team);
at::Tensor all_to_all(const at::Tensor& given, const Cut& from, const Cut& to, const std::string& team);

}  // namespace lamina::tensor_parallel
