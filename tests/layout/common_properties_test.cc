// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>
#include <rapidcheck.h>
#include <rapidcheck/gtest.h>

#include <map>

#include "tests/layout/any_layout.h"

namespace lamina::layout {
namespace {

using Pieces = std::vector<Elements>;  // the memory of all holders of a tensor

std::int64_t& at(Elements& elements, std::int64_t offset) { return elements.at(static_cast<std::size_t>(offset)); }

// Copies a tensor from the memory of one layout's holders into that of another's, where padding stays as it is.
Pieces copied(const ParameterLayout& from, Pieces& source, const ParameterLayout& to) {
  Pieces target;
  for (const Piece& piece : pieces(to)) {
    Elements& memory = target.emplace_back(static_cast<std::size_t>(piece.region.size), kPadding);
    const std::vector<Piece> sources = pieces(from);
    for (std::size_t i = 0; i < sources.size(); ++i) {
      for (const Run& run : common(sources[i].region, piece.region)) {
        for (std::int64_t k = 0; k < run.count; ++k) at(memory, run.to + k) = at(source[i], run.from + k);
      }
    }
  }
  return target;
}

Pieces filled(const ParameterLayout& layout) {
  Pieces all;
  for (const Piece& piece : pieces(layout)) all.push_back(piece_of(layout, piece.slice, piece.shard));
  return all;
}

// The fewest runs of two pieces, found element by element.
std::vector<Run> fewest_runs(const Elements& from, const Elements& to) {
  std::map<std::int64_t, std::int64_t> found;
  for (std::size_t i = 0; i < from.size(); ++i) {
    if (from[i] != kPadding) found[from[i]] = static_cast<std::int64_t>(i);
  }
  std::vector<Run> runs;
  for (std::size_t i = 0; i < to.size(); ++i) {
    const auto here = found.find(to[i]);
    if (here == found.end()) continue;
    const Run one{here->second, static_cast<std::int64_t>(i), 1};
    if (!runs.empty() && runs.back().from + runs.back().count == one.from &&
        runs.back().to + runs.back().count == one.to) {
      ++runs.back().count;
    } else {
      runs.push_back(one);
    }
  }
  return runs;
}

RC_GTEST_PROP(LayoutProperty, APieceHoldsTheElementsOfItsDefinitionInTheirOrder, ()) {
  const ParameterLayout layout = any_layout(any_shape());
  for (const Piece& piece : pieces(layout)) {
    RC_ASSERT(piece.region == held(layout, piece.slice, piece.shard));
    RC_ASSERT(elements_of(piece.region) == piece_of(layout, piece.slice, piece.shard));
  }
}

RC_GTEST_PROP(LayoutProperty, PiecesTileTheTensorWithoutGapOrOverlap, ()) {
  const ParameterLayout layout = any_layout(any_shape());
  Elements seen(static_cast<std::size_t>(numel(layout.shape)), 0);
  for (const Piece& piece : pieces(layout)) {
    for (const Run& run : common(piece.region, whole(layout.shape))) {
      RC_ASSERT(run.count > 0 && run.from >= 0 && run.from + run.count <= piece.region.size);
      for (std::int64_t i = 0; i < run.count; ++i) ++at(seen, run.to + i);
    }
  }
  RC_ASSERT(seen == Elements(seen.size(), 1));
}

RC_GTEST_PROP(LayoutProperty, ShardsOfASliceAreOfOneSize, ()) {
  const ParameterLayout layout = any_layout(any_shape());
  for (const Piece& piece : pieces(layout)) {
    RC_ASSERT(piece.region.size == held(layout, piece.slice, 0).size);
    if (!layout.slicing || layout.slicing->padded) RC_ASSERT(piece.region.size == held(layout, 0, 0).size);
  }
}

RC_GTEST_PROP(CommonProperty, RunsBetweenAnyTwoLayoutsCopyTheTensorExactly, ()) {
  const Shape shape = any_shape();
  const ParameterLayout from = any_layout(shape);
  const ParameterLayout to = any_layout(shape);
  Pieces source = filled(from);
  Pieces target = copied(from, source, to);
  RC_ASSERT(target == filled(to));
  RC_ASSERT(copied(to, target, from) == source);
}

RC_GTEST_PROP(CommonProperty, RunsAreTheFewestAndAscend, ()) {
  const Shape shape = any_shape();
  const ParameterLayout from = any_layout(shape);
  const ParameterLayout to = any_layout(shape);
  for (const Piece& a : pieces(from)) {
    for (const Piece& b : pieces(to)) {
      const auto expected = fewest_runs(piece_of(from, a.slice, a.shard), piece_of(to, b.slice, b.shard));
      RC_ASSERT(common(a.region, b.region) == expected);
    }
  }
}

}  // namespace
}  // namespace lamina::layout
