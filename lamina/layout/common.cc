// SPDX-License-Identifier: Apache-2.0
#include "lamina/layout/common.h"

#include <algorithm>
#include <sstream>
#include <string>
#include <utility>

#include "lamina/base/error.h"
#include "lamina/base/str.h"

namespace lamina::layout {
namespace {

std::string text(const Shape& shape) {
  std::ostringstream out;
  for (std::size_t i = 0; i < shape.size(); ++i) out << (i == 0 ? "" : ", ") << shape[i];
  return base::str("(", out.str(), ")");
}

Region of_shape(Region region, const Shape& shape) {
  if (region.whole == shape) return region;
  throw base::InternalError(base::str("regions of tensors of shapes ", text(region.whole), " and ", text(shape),
                                      " have nothing in common; expected two regions of one tensor"));
}

}  // namespace

Finder::Finder(Region region) : region_(std::move(region)) {
  if (region_.begin == region_.end) return;
  const Shape& shape = region_.whole;
  for (std::size_t d = static_cast<std::size_t>(region_.dim) + 1; d < shape.size(); ++d) inner_ *= shape[d];
  whole_row_ = inner_ * (shape.empty() ? 1 : shape[static_cast<std::size_t>(region_.dim)]);
  slice_row_ = inner_ * region_.extent;
  const Spot first = spot(region_.begin, slice_row_, &Stripe::at);
  first_ = first.row * whole_row_ + region_.stripes[first.stripe].begin * inner_ + first.skip;
}

// The first element of a stripe at or after `offset`, counted in rows of the tensor (`start` is Stripe::begin) or of
// the slice (Stripe::at).
Finder::Spot Finder::spot(std::int64_t offset, std::int64_t row_size, std::int64_t Stripe::* start) const {
  const std::vector<Stripe>& stripes = region_.stripes;
  const std::int64_t row = offset / row_size;
  const std::int64_t column = offset % row_size;
  const auto found = std::partition_point(stripes.begin(), stripes.end(), [&](const Stripe& stripe) {
    return (stripe.*start + stripe.count) * inner_ <= column;
  });
  if (found == stripes.end()) return {.row = row + 1};
  return {row, static_cast<std::size_t>(found - stripes.begin()),
          std::max<std::int64_t>(0, column - (*found).*start * inner_)};
}

std::optional<Finder::Block> Finder::at_or_after(std::int64_t offset) const {
  if (region_.begin == region_.end) return std::nullopt;
  const Spot found = spot(std::max(offset, first_), whole_row_, &Stripe::begin);
  const Stripe& stripe = region_.stripes[found.stripe];
  const std::int64_t in_slice = found.row * slice_row_ + stripe.at * inner_ + found.skip;
  if (in_slice >= region_.end) return std::nullopt;
  return Block{found.row * whole_row_ + stripe.begin * inner_ + found.skip, in_slice - region_.begin,
               std::min(stripe.count * inner_ - found.skip, region_.end - in_slice)};
}

CommonRuns::CommonRuns(Region from, Region to) : from_(of_shape(std::move(from), to.whole)), to_(std::move(to)) {}

std::optional<Run> CommonRuns::next_block() {
  while (true) {
    const auto from = from_.at_or_after(offset_);
    if (!from) return std::nullopt;
    const auto to = to_.at_or_after(from->offset);
    if (!to) return std::nullopt;
    const std::int64_t skip = to->offset - from->offset;
    const std::int64_t count = std::min(from->count - skip, to->count);
    offset_ = to->offset + std::max<std::int64_t>(count, 0);
    if (count > 0) return Run{from->at + skip, to->at, count};
  }
}

std::optional<Run> CommonRuns::next() {
  while (const auto block = next_block()) {
    if (so_far_ && so_far_->from + so_far_->count == block->from && so_far_->to + so_far_->count == block->to) {
      so_far_->count += block->count;
    } else if (const auto done = std::exchange(so_far_, block)) {
      return done;
    }
  }
  return std::exchange(so_far_, std::nullopt);
}

std::vector<Run> common(const Region& from, const Region& to) {
  std::vector<Run> runs;
  CommonRuns all(from, to);
  while (const auto run = all.next()) runs.push_back(*run);
  return runs;
}

}  // namespace lamina::layout
