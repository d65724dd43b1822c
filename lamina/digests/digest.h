// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

// Digests: what runs have computed, in so few numbers that two runs can be compared module by module.
namespace lamina::digests {

constexpr int kProjections = 8;

// [Note: digests] A tensor in a handful of numbers. The numbers of its parts add up to those of the whole, wherever
// they lie. A projection is the sum of all elements, each with a sign that its place in the whole tensor says. So the
// difference of the projections of two tensors is about as large as the norm of their difference, whatever that looks
// like.
struct Digest {
  std::string dtype;                // "float32"
  std::vector<std::int64_t> shape;  // of the whole tensor
  std::int64_t begin = 0;           // the place of the first element that the numbers are of
  std::int64_t elements = 0;        // so many
  double squares = 0;               // the sum of the squares of those that are finite
  std::array<double, kProjections> projections{};
  std::int64_t not_finite = 0;
  double largest = 0;      // absolute value of those that are finite
  std::int64_t small = 0;  // so many that are not zero, but hardly more than rounding leaves of the largest
  std::uint64_t bits = 0;  // the sum of a hash of each element's bits and place; 0 where nobody asked for it

  std::int64_t whole() const;  // elements of the whole tensor
  double norm() const;
  friend bool operator==(const Digest&, const Digest&) = default;
};

// Adds another part of the same tensor, which lies behind this one.
void add(Digest& part, const Digest& next);

// The norm of the difference of two tensors, as far as their digests tell.
double distance(const Digest& first, const Digest& second);

// The sign of an element in a projection, +1 or -1. It is the product of that of its place in a block, that of its lane
// in this projection, and that of the block in this projection. A lane is a place in a row of the block. So the rows
// are added up before anything is projected.
constexpr std::int64_t kLanes = 256;
constexpr std::int64_t kBlock = 8 * kLanes;
double sign_of(std::int64_t place, int projection);

// Adds numbers that lie one after the other, the first at this place of the whole tensor, all in one block. Counts
// those that are not finite, and makes them zero.
void add(Digest& digest, std::int64_t place, std::span<double> numbers);

// Elements are small that are not zero and below this fraction of the largest.
constexpr double kSmall = 1e-5;

}  // namespace lamina::digests
