// SPDX-License-Identifier: Apache-2.0
#include "lamina/layout/parameter_layout.h"

#include <algorithm>

#include "lamina/base/error.h"
#include "lamina/base/str.h"

namespace lamina::layout {
namespace {

using base::str;

// Rounds up, without overflow.
std::int64_t quotient_up(std::int64_t a, std::int64_t b) { return a / b + (a % b != 0 ? 1 : 0); }

// Takes numbers from 0 to kMostElements + 1 and returns one: all larger products are kMostElements + 1.
std::int64_t product(std::int64_t a, std::int64_t b) {
  return a > 0 && b > kMostElements / a ? kMostElements + 1 : a * b;
}

// Positions of a section that a slice has room for.
std::int64_t share(const Section& section, int degree) {
  return product(quotient_up(quotient_up(section.extent, section.unit), degree), section.unit);
}

std::string problem_of(const Slicing& slicing, const Shape& shape) {
  if (slicing.degree < 1) return str("slicing into ", slicing.degree, "; expected at least 1");
  if (slicing.dim < 0 || static_cast<std::size_t>(slicing.dim) >= shape.size()) {
    return str("slicing along dimension ", slicing.dim, " of ", shape.size());
  }
  const std::int64_t extent = shape[static_cast<std::size_t>(slicing.dim)];
  std::int64_t left = extent;
  std::int64_t padded = 0;
  for (const Section& section : slicing.sections) {
    if (section.extent < 0 || section.unit < 1 || section.unit > kMostElements) {
      return str("a section of ", section.extent, " in units of ", section.unit);
    }
    if (section.extent > left) return str("sections of more than the ", extent, " along dimension ", slicing.dim);
    left -= section.extent;
    padded = std::min(padded + product(share(section, slicing.degree), slicing.degree), kMostElements + 1);
  }
  if (left > 0) return str("sections that leave ", left, " of the ", extent, " along dimension ", slicing.dim);
  for (std::size_t d = 0; d < shape.size(); ++d) {
    if (d != static_cast<std::size_t>(slicing.dim)) padded = product(padded, std::max<std::int64_t>(shape[d], 1));
  }
  return padded > kMostElements ? "slices that have, with padding, more than 2^60 elements" : "";
}

std::string problem_of(const Shape& shape) {
  try {
    numel(shape);
    return "";
  } catch (const base::ConfigError& error) {
    return error.what();
  }
}

// Joins stripes that touch.
void append(std::vector<Stripe>& stripes, const Stripe& next) {
  if (next.count == 0) return;
  if (!stripes.empty()) {
    Stripe& last = stripes.back();
    if (last.begin + last.count == next.begin && last.at + last.count == next.at) {
      last.count += next.count;
      return;
    }
  }
  stripes.push_back(next);
}

// A whole slice.
Region sliced(const Shape& shape, const Slicing& slicing, int slice) {
  Region region{.whole = shape, .dim = slicing.dim};
  std::int64_t begin = 0;
  for (const Section& section : slicing.sections) {
    const std::int64_t room = share(section, slicing.degree);
    const std::int64_t skip = std::min(slice * room, section.extent);
    const std::int64_t count = std::min(room, section.extent - skip);
    append(region.stripes, {begin + skip, region.extent, count});
    region.extent += slicing.padded ? room : count;
    begin += section.extent;
  }
  if (region.stripes == std::vector<Stripe>{{0, 0, begin}} && region.extent == begin) return whole(shape);
  Shape slice_shape = shape;
  slice_shape[static_cast<std::size_t>(slicing.dim)] = region.extent;
  region.size = numel(slice_shape);
  region.end = region.stripes.empty() ? 0 : region.size;
  return region;
}

// A piece of a layout that was checked.
Region piece(const ParameterLayout& layout, int slice, int shard) {
  Region region = layout.slicing ? sliced(layout.shape, *layout.slicing, slice) : whole(layout.shape);
  const auto share = share_of(region.size, layout.shards, shard);
  region.begin = std::min(share.begin, region.end);
  region.end = std::min(share.end, region.end);
  region.size = share.size;
  return region;
}

}  // namespace

void check(const ParameterLayout& layout) {
  std::string problems;
  const auto add = [&](const std::string& problem) { problems += problem.empty() ? "" : "\n  " + problem; };
  const std::string shape = problem_of(layout.shape);
  add(shape);
  if (layout.slicing && shape.empty()) add(problem_of(*layout.slicing, layout.shape));
  if (layout.shards < 1) add(str("sharding into ", layout.shards, "; expected at least 1"));
  if (layout.partition.value < 0) add(str("partition ", layout.partition, "; expected 0 or more"));
  if (!problems.empty()) throw base::ConfigError(str("the layout of ", layout.name, " is not possible:", problems));
}

Region held(const ParameterLayout& layout, int slice, int shard) {
  check(layout);
  if (slice < 0 || slice >= layout.slices() || shard < 0 || shard >= layout.shards) {
    throw base::InternalError(str("there is no shard ", shard, " of slice ", slice, " of ", layout.name, ", which has ",
                                  layout.slices(), " slices and ", layout.shards, " shards of each"));
  }
  return piece(layout, slice, shard);
}

}  // namespace lamina::layout
