// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

// Tensors that slices were joined into, among others: see [Note: guarded slices].
namespace lamina::value {

// Places along one dimension of a tensor, as an operation is given them: negative ones count from the end.
struct PlacesAlong {
  int dim;
  std::int64_t begin, end, step = 1;
};

// Guards what `cat` or `stack` made of `parts`, of which some are slices, along `dim`.
void guard_joined(const at::Tensor& made, at::TensorList parts, std::int64_t dim, bool stacks);
// True where these places of a joined tensor are those that they would be with wholes: all places of some of its parts,
// or of wholes before the first slice. Along another dimension, no part is cut in that.
bool has_parts_at(const at::Tensor& joined, const PlacesAlong& places);
// Guards a view of these places as what is there; one of wholes is guarded no more.
void guard_parts(const at::Tensor& view, const at::Tensor& joined, const PlacesAlong& places);

}  // namespace lamina::value
