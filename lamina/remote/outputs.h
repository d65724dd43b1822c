// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "lamina/remote/graph.h"
#include "lamina/value/reference_tensor.h"
#include "lamina/value/value.h"

// The arguments and results of a module, made ready to leave its rank.
namespace lamina::remote {

// How often each was written to, so far.
std::vector<std::uint32_t> versions(const Tensors& tensors);
// The arguments that were written to since they had the versions `before`, with their positions.
value::List written(const Tensors& arguments, const std::vector<std::uint32_t>& before);

// References in the place of the arguments that a module hands back as they are.
void replace_arguments(value::Value& outputs, const Tensors& arguments);

// Copies in the place of outputs that the module, its arguments or its graph hold as well. The module's next call may
// write to them, with the slot, while they are on their way without it. What has a graph of its own is left to the
// check of its version, as autograd leaves it.
void copy_what_others_hold(value::Value& outputs);

// A tensor as it is delivered: dense, with its own strides where it is dense already.
at::Tensor dense(const at::Tensor& tensor);
// How that looks: what a reference in its place is told.
value::TensorSpec delivered_spec(const at::Tensor& tensor);
// dense() of every tensor of an answer that the caller waits for: the next time it has a reference in its place.
void make_dense(value::Value& tree);

}  // namespace lamina::remote
