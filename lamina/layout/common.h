// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "lamina/layout/region.h"

namespace lamina::layout {

// `count` elements that follow each other in two pieces: at `from` in the one, at `to` in the other.
struct Run {
  std::int64_t from = 0;
  std::int64_t to = 0;
  std::int64_t count = 0;

  friend bool operator==(const Run&, const Run&) = default;
};

// Finds the elements of a tensor in a region; see [Note: region].
class Finder {
 public:
  explicit Finder(Region region);

  // Elements that follow each other both in the tensor and in the piece.
  struct Block {
    std::int64_t offset = 0;  // in the tensor
    std::int64_t at = 0;      // in the piece
    std::int64_t count = 0;
  };

  // The first that are held at or after an offset in the tensor; none when all lie before it. Takes time logarithmic in
  // the number of stripes.
  std::optional<Block> at_or_after(std::int64_t offset) const;

 private:
  struct Spot {
    std::int64_t row = 0;
    std::size_t stripe = 0;
    std::int64_t skip = 0;  // elements of the stripe's row before this one
  };

  Spot spot(std::int64_t offset, std::int64_t row_size, std::int64_t Stripe::* start) const;

  Region region_;
  std::int64_t inner_ = 1;      // elements of one position along the dimension of the stripes
  std::int64_t whole_row_ = 0;  // elements of a row, which is all positions, in the tensor and in the slice
  std::int64_t slice_row_ = 0;
  std::int64_t first_ = 0;  // the offset in the tensor of the first element of the piece, or beyond it
};

// The elements that two regions of one tensor have in common, as the fewest runs, ascending in both pieces: to make one
// piece of another, copy the runs. Padding is in no run. A contiguous block is one run, a slice of the columns of a
// matrix one run for each row; between two matrices sliced alike it is one run altogether.
//
//   CommonRuns runs(held(old_layout, 0, 1), held(new_layout, 3, 0));
//   while (const auto run = runs.next()) std::copy_n(old + run->from, run->count, piece + run->to);
//
// Takes a constant time for each row that either region cuts where both have elements, and no memory that grows with
// their number.
class CommonRuns {
 public:
  // Throws UsageError when the regions are of tensors of different shapes.
  CommonRuns(Region from, Region to);

  std::optional<Run> next();

 private:
  std::optional<Run> next_block();

  Finder from_;
  Finder to_;
  std::int64_t offset_ = 0;    // in the tensor: what lies before it is done
  std::optional<Run> so_far_;  // grows as long as blocks follow each other
};

// Every one of these runs at once. Two large matrices cut across each other have one for each row: rather iterate.
std::vector<Run> common(const Region& from, const Region& to);

}  // namespace lamina::layout
