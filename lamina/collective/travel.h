// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "lamina/collective/group.h"

// [Note: types that travel] Gradients of floating-point numbers may travel in another type than they have. Each member
// casts its own, once; they are summed in float32 or what is wider, whoever carries them; and the sum is cast to the
// type that it is kept in. Where all members want a whole sum it travels a second time, in that type, too: so the bits
// are the same on all. What travels in 16 bits is divided before it is cast: the sum could be too large.
namespace lamina::collective {

// The type in which tensors of `type` travel where `asked` is; none: as they are.
std::optional<at::ScalarType> travelling(at::ScalarType type, std::optional<at::ScalarType> asked);

// A tensor of its own, the quotient in that type, rounded once.
at::Tensor to_travel(const at::Tensor& tensor, at::ScalarType type, int divisor);

// `tensor`, divided by `divisor`, becomes the sum over the members; it travels as `type`.
Started all_reduce_as(at::ScalarType type, at::Tensor tensor, int divisor, Group& group, CallOptions call_options);

}  // namespace lamina::collective
