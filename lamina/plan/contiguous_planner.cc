// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <optional>
#include <tuple>
#include <utility>

#include "lamina/plan/cut.h"
#include "lamina/plan/partition.h"
#include "lamina/plan/units.h"

namespace lamina::plan {
namespace {

// How far above the mean the largest partition may be before modules are cut open. A cut inside a module adds calls
// between ranks, forward and backward, in every microbatch; parameter bytes predict time no better than this anyway.
constexpr double kTolerance = 1.2;

struct Division {
  std::vector<Unit> units;
  Cut cut;
};

Division divide(std::vector<Unit> units, int partitions) {
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
    Division other = divide(replaced(units, at, parts), partitions);
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

// The rest follows the units: what is under them or has no parameters its parent, sharing nodes their group, and
// modules all of whose parameters count elsewhere the first of these.
void follow(const ModuleTree& tree, const WeighedTree& weighed, std::vector<int>& owner) {
  const int size = static_cast<int>(tree.size());
  for (int node = 1; node < size; ++node) {
    if (owner[node] < 0) owner[node] = owner[tree[node].parent];
  }
  for (int node = 1; node < size; ++node) {
    const int holder = weighed.first_holder(node);
    if (weighed.group(node) != node) {
      owner[node] = owner[weighed.group(node)];
    } else if (holder < 0 || !tree[node].callable) {
      owner[node] = owner[tree[node].parent];
    } else if (weighed.bytes(node) == 0) {
      owner[node] = owner[weighed.group(holder)];
    }
  }
}

class Contiguous : public Planner {
 public:
  Assignment assign(const ModuleTree& tree, int partitions) const override {
    if (tree.empty()) return {};
    const WeighedTree weighed(tree);
    const double limit = kTolerance * static_cast<double>(weighed.bytes(0)) / partitions;
    Division division = divide(necessary_units(weighed, partitions, limit), partitions);
    while (static_cast<double>(division.cut.largest) > limit && improve(weighed, partitions, division)) {
    }
    std::vector<int> owner(tree.size(), -1);
    std::size_t at = 0;
    for (std::size_t segment = 0; segment < division.cut.ends.size(); ++segment) {
      for (; at < division.cut.ends[segment]; ++at) {
        const Unit& unit = division.units[at];
        owner[unit.node] = static_cast<int>(segment);
        for (int head : unit.heads) owner[head] = static_cast<int>(segment);
      }
    }
    follow(tree, weighed, owner);
    Assignment owners;
    for (int partition : owner) owners.emplace_back(partition);
    return owners;
  }
};

}  // namespace

std::unique_ptr<Planner> contiguous_planner() { return std::make_unique<Contiguous>(); }

}  // namespace lamina::plan
