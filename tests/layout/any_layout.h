// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <rapidcheck.h>

#include <cstdint>
#include <vector>

#include "lamina/layout/common.h"
#include "lamina/layout/parameter_layout.h"
#include "tests/layout/pieces.h"

// Random layouts, and the elements of their pieces by the definition, one by one.
namespace lamina::layout {

using Elements = std::vector<std::int64_t>;  // of a piece, in order: offsets in the tensor, or kPadding

inline constexpr std::int64_t kPadding = -1;

inline Shape any_shape() {
  Shape shape(*rc::gen::inRange<std::size_t>(0, 5).as("dimensions"));
  for (std::int64_t& size : shape)
    size = *rc::gen::weightedElement<int>({{1, 0}, {3, 1}, {4, 2}, {4, 3}, {4, 5}, {2, 8}});
  return shape;
}

inline Slicing any_slicing(const Shape& shape, int degree) {
  Slicing slicing{.dim = *rc::gen::inRange<int>(0, static_cast<int>(shape.size())).as("dim"),
                  .degree = degree,
                  .padded = *rc::gen::arbitrary<bool>().as("padded")};
  for (std::int64_t left = shape[static_cast<std::size_t>(slicing.dim)]; left > 0;) {
    const Section section{*rc::gen::inRange<std::int64_t>(1, left + 1).as("section"),
                          *rc::gen::element<std::int64_t>(1, 1, 2, 3).as("unit")};
    slicing.sections.push_back(section);
    left -= section.extent;
  }
  return slicing;
}

inline ParameterLayout any_layout(const Shape& shape) {
  ParameterLayout layout{.name = "w", .shape = shape, .shards = *rc::gen::inRange(1, 8).as("shards")};
  if (!shape.empty() && *rc::gen::inRange(0, 4).as("sliced") > 0) {
    layout.slicing = any_slicing(shape, *rc::gen::inRange(1, 6).as("degree"));
  }
  return layout;
}

// The positions along the sliced dimension that a slice keeps.
inline Elements positions_of(const Slicing& slicing, int slice) {
  Elements positions;
  std::int64_t begin = 0;
  for (const Section& section : slicing.sections) {
    std::int64_t units = 0;  // of a slice
    while (units * section.unit * slicing.degree < section.extent) ++units;
    for (std::int64_t i = 0; i < units * section.unit; ++i) {
      const std::int64_t position = slice * units * section.unit + i;
      if (position < section.extent) positions.push_back(begin + position);
      if (position >= section.extent && slicing.padded) positions.push_back(kPadding);
    }
    begin += section.extent;
  }
  return positions;
}

inline Elements slice_of(const ParameterLayout& layout, int slice) {
  Elements elements;
  if (!layout.slicing) {
    for (std::int64_t i = 0; i < numel(layout.shape); ++i) elements.push_back(i);
    return elements;
  }
  const auto dim = static_cast<std::size_t>(layout.slicing->dim);
  std::int64_t outer = 1;
  std::int64_t inner = 1;
  for (std::size_t d = 0; d < dim; ++d) outer *= layout.shape[d];
  for (std::size_t d = dim + 1; d < layout.shape.size(); ++d) inner *= layout.shape[d];
  for (std::int64_t row = 0; row < outer; ++row) {
    for (std::int64_t position : positions_of(*layout.slicing, slice)) {
      for (std::int64_t i = 0; i < inner; ++i) {
        elements.push_back(position == kPadding ? kPadding : (row * layout.shape[dim] + position) * inner + i);
      }
    }
  }
  return elements;
}

inline Elements piece_of(const ParameterLayout& layout, int slice, int shard) {
  const Elements all = slice_of(layout, slice);
  std::size_t size = 0;  // of a shard
  while (size * static_cast<std::size_t>(layout.shards) < all.size()) ++size;
  Elements elements;
  for (std::size_t i = size * static_cast<std::size_t>(shard); elements.size() < size; ++i) {
    elements.push_back(i < all.size() ? all[i] : kPadding);
  }
  return elements;
}

// Elements of a region, as the runs to it say.
inline Elements elements_of(const Region& region) {
  Elements elements(static_cast<std::size_t>(region.size), kPadding);
  for (const Run& run : common(whole(region.whole), region)) {
    for (std::int64_t i = 0; i < run.count; ++i) elements.at(static_cast<std::size_t>(run.to + i)) = run.from + i;
  }
  return elements;
}

}  // namespace lamina::layout
