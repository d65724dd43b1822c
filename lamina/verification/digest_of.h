// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "lamina/digests/digest.h"

namespace lamina::verification {

// Where a tensor lies in a whole one, of which it is a part.
struct PartOf {
  std::vector<std::int64_t> shape;  // of the whole
  std::int64_t begin = 0;           // the place of its first element there, row by row
};

// True of kinds of numbers that digests can be made of: all but those of less than a byte.
bool digest_can_be_made(at::ScalarType type);
// The digest of a tensor that has a value, of such a kind, on any device; see [Note: digests]. `bits`: also the
// hash of its bits.
digests::Digest digest_of(const at::Tensor& tensor, bool bits);
// Makes it of a part of a tensor. Small elements are counted, too.
digests::Digest digest_of(const at::Tensor& tensor, bool bits, const PartOf& part);

}  // namespace lamina::verification
