// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "lamina/value/value.h"

// A value tree as bytes and buffers, the form in which it travels.
//
// [Note: aliases] Tensors of one tree that share storage share it again after decoding. The buffers are the storages,
// cut to the range that the tree's tensors cover, and each tensor is a view of a buffer. The same tensor object in two
// places decodes to one tensor object.
namespace lamina::value {

struct Encoded {
  std::string meta;                 // the tree, and how its tensors lie in the buffers
  std::vector<at::Tensor> buffers;  // 1-D uint8, contiguous; they alias the encoded tensors' memory where they can
};

// Throws base::UsageError for a tensor that cannot travel (sparse, quantized, meta, a subclass's wrapper).
Encoded encode(const Value& tree);

// Takes the buffers as the tensors' memory. Tensors come back as leaves with the requires_grad they were encoded with;
// a tensor that had a graph has none here. Throws base::FormatError for anything that encode() did not write.
Value decode(std::string_view meta, std::vector<at::Tensor> buffers);

// The tree as another rank would receive it, in memory of its own.
Value copied(const Value& tree);

}  // namespace lamina::value
