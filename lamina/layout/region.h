// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace lamina::layout {

// The sizes of a tensor; empty for one of zero dimensions, which has one element.
using Shape = std::vector<std::int64_t>;

// The most elements that a tensor has, with all padding: so far below 2^63 that no sum of offsets overflows.
inline constexpr std::int64_t kMostElements = std::int64_t{1} << 60;

// The number of elements. Throws ConfigError for a negative size and for more than kMostElements; a size of 0 counts
// as 1 there, since strides are products, too.
std::int64_t numel(const Shape& shape);

// A part of elements that are shared out: those from `begin` to `end`, in memory for `size`, the rest of which is
// padding.
struct Share {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  std::int64_t size = 0;

  std::int64_t count() const { return end - begin; }
  friend bool operator==(const Share&, const Share&) = default;
};

// Shares `numel` elements out: each of `members` has ceil(numel / members) that follow each other, in the order of the
// members, and the last ones what is left, or none.
constexpr Share share_of(std::int64_t numel, int members, int member) {
  const auto size = numel / members + (numel % members != 0 ? 1 : 0);
  const auto begin = std::min(size * member, numel);
  return {begin, std::min(begin + size, numel), size};
}

// `count` positions along the dimension in which a tensor is sliced: at `begin` in the tensor, at `at` in the slice.
struct Stripe {
  std::int64_t begin = 0;
  std::int64_t at = 0;
  std::int64_t count = 0;

  friend bool operator==(const Stripe&, const Stripe&) = default;
};

// [Note: region] The elements of a tensor that one holder keeps, in the order in which they lie in its memory.
//   tensor   row-major, of shape `whole`
//   slice    the stripes, side by side along `dim`: a row-major tensor with `extent` positions there; those that no
//            stripe covers are padding
//   piece    elements [begin, end) of the slice, flattened, in memory for `size` elements; the rest of it is padding
// Since stripes ascend, elements lie in a piece in their order in the tensor. Example: queries, keys and values side by
// side in a weight of shape (4, 12), each 4 columns wide, sliced in two; the first slice sharded in two:
//
//   a row of the tensor   q0 q1 q2 q3 k0 k1 k2 k3 v0 v1 v2 v3
//   a row of the slice    q0 q1 k0 k1 v0 v1                     stripes {0, 0, 2} {4, 2, 2} {8, 4, 2}, extent 6
//   shard 1 of the slice  its rows 2 and 3                      begin 12, end 24, size 12
//
// `held` (parameter_layout.h) and `whole` make regions; a region made otherwise has to be as these would make it.
struct Region {
  Shape whole;
  int dim = 0;
  std::vector<Stripe> stripes;  // ascending, none empty, no two that touch; where there are none, end is 0
  std::int64_t extent = 0;
  std::int64_t begin = 0;
  std::int64_t end = 0;
  std::int64_t size = 0;

  friend bool operator==(const Region&, const Region&) = default;
};

// A whole tensor, without padding.
Region whole(const Shape& shape);

}  // namespace lamina::layout
