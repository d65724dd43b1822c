// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>

namespace lamina::pipeline {

// [Note: offsets] A tensor of offsets into another one (the bags of an EmbeddingBag, the sequences of a packed batch)
// has no pieces. Where its length divides by the microbatches, each would get the offsets of other rows, in silence.
// Only its values tell it from one of rows: one-dimensional integers that begin with 0, do not fall, and lie in a
// tensor of another length. Sorted numbers of classes look alike where a batch is small. So a tensor whose name says
// nothing counts as offsets only where it ends with the other's length. It also does where it has four different values
// or more, and does not just number the rows. Values that lie on a device are looked at in the first batch of a step
// function alone, for that is a wait (KnownParts).

// True where such a tensor, which is to be split, holds offsets, as far as can be told. `lengths`: of the others that
// are to be split. `is_called_so`: its name says so.
bool looks_like_offsets(const at::Tensor& tensor, std::span<const std::int64_t> lengths, bool is_called_so);

}  // namespace lamina::pipeline
