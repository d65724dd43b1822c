// SPDX-License-Identifier: Apache-2.0
#include "lamina/plan/division.h"

#include <algorithm>
#include <optional>
#include <tuple>
#include <utility>

namespace lamina::plan {
namespace {

// How far above the mean the largest partition may be before modules are cut open. A cut inside a module adds calls
// between ranks, forward and backward, in every microbatch; parameter bytes predict time no better than this anyway.
constexpr double kTolerance = 1.2;

Division cut_units(std::vector<Unit> units, int partitions) {
  std::vector<std::int64_t> weights;
  weights.reserve(units.size());
  for (const Unit& unit : units) weights.push_back(unit.bytes);
  Cut cut = cut_evenly(weights, partitions);
  return {std::move(units), std::move(cut)};
}

std::vector<Unit> replaced(const std::vector<Unit>& units, std::size_t at, const std::vector<Unit>& parts) {
  std::vector<Unit> result(units.begin(), units.begin() + static_cast<std::ptrdiff_t>(at));
  result.insert(result.end(), parts.begin(), parts.end());
  result.insert(result.end(), units.begin() + static_cast<std::ptrdiff_t>(at) + 1, units.end());
  return result;
}

// Positions in units[begin, end), heaviest first.
std::vector<std::size_t> heaviest_first(const std::vector<Unit>& units, std::size_t begin, std::size_t end) {
  std::vector<std::size_t> order;
  for (std::size_t at = begin; at < end; ++at) order.push_back(at);
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return units[a].bytes > units[b].bytes; });
  return order;
}

// Expands what has to be in any case: units above the limit, and, while there are too few, the heaviest ones.
std::vector<Unit> necessary_units(const WeighedTree& tree, int partitions, double limit) {
  std::vector<Unit> units{tree.root()};
  const auto expand_one = [&] {
    for (std::size_t at : heaviest_first(units, 0, units.size())) {
      const bool too_few = units.size() < static_cast<std::size_t>(partitions);
      if (!too_few && static_cast<double>(units[at].bytes) <= limit) return false;
      const std::vector<Unit> parts = tree.expand(units[at]);
      if (parts.empty()) continue;
      units = replaced(units, at, parts);
      return true;
    }
    return false;
  };
  while (expand_one()) {
  }
  return units;
}

// The first expansion in units[begin, end), heaviest first, that makes a better cut.
std::optional<Division> better(const WeighedTree& tree, int partitions, const Division& division, std::size_t begin,
                               std::size_t end) {
  const auto& [units, cut] = division;
  for (std::size_t at : heaviest_first(units, begin, end)) {
    const std::vector<Unit> parts = tree.expand(units[at]);
    if (parts.empty()) continue;
    Division other = cut_units(replaced(units, at, parts), partitions);
    if (std::tie(other.cut.largest, other.cut.spread) < std::tie(cut.largest, cut.spread)) return other;
  }
  return std::nullopt;
}

// Expands one unit of a largest segment where that makes a better cut. False when there is none.
bool improve(const WeighedTree& tree, int partitions, Division& division) {
  std::size_t begin = 0;
  for (std::size_t end : division.cut.ends) {
    std::int64_t sum = 0;
    for (std::size_t at = begin; at < end; ++at) sum += division.units[at].bytes;
    if (sum == division.cut.largest) {
      if (auto other = better(tree, partitions, division, begin, end)) {
        division = std::move(*other);
        return true;
      }
    }
    begin = end;
  }
  return false;
}

}  // namespace

Division divide(const WeighedTree& tree, int partitions) {
  const double limit = kTolerance * static_cast<double>(tree.root().bytes) / partitions;
  Division division = cut_units(necessary_units(tree, partitions, limit), partitions);
  while (static_cast<double>(division.cut.largest) > limit && improve(tree, partitions, division)) {
  }
  return division;
}

}  // namespace lamina::plan
