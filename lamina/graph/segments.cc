// SPDX-License-Identifier: Apache-2.0
#include "lamina/graph/segments.h"

#include <algorithm>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include "lamina/base/error.h"

namespace lamina::graph {
namespace {

std::vector<int> earliest_levels(const std::vector<Placed>& operations) {
  std::vector<int> levels(operations.size());
  for (std::size_t i = 0; i < operations.size(); ++i) {
    for (const OperationOutput& input : operations[i].inputs) {
      base::internal_check(input.operation < static_cast<int>(i), "an operation that reads a later one");
      const bool crosses = operations[input.operation].partition != operations[i].partition;
      levels[i] = std::max(levels[i], levels[input.operation] + (crosses ? 1 : 0));
    }
    for (const int before : operations[i].after) {
      if (operations[before].partition == operations[i].partition) levels[i] = std::max(levels[i], levels[before]);
    }
  }
  return levels;
}

// Per operation: the latest level at which all that follows it still finds it over.
std::vector<int> latest_levels(const std::vector<Placed>& operations, const std::vector<OperationOutput>& results) {
  constexpr int kAny = std::numeric_limits<int>::max();
  auto levels = earliest_levels(operations);
  std::vector<int> latest(operations.size(), kAny);
  std::vector<bool> stays(operations.size());
  for (const OperationOutput& result : results) stays[result.operation] = true;
  for (int i = static_cast<int>(operations.size()) - 1; i >= 0; --i) {
    if (!stays[i] && latest[i] != kAny) levels[i] = latest[i];
    const auto followed_here = [&](int before) { latest[before] = std::min(latest[before], levels[i]); };
    for (const OperationOutput& input : operations[i].inputs) {
      if (operations[input.operation].partition == operations[i].partition) {
        followed_here(input.operation);
      } else {
        stays[input.operation] = true;
      }
    }
    for (const int before : operations[i].after) {
      if (operations[before].partition == operations[i].partition) followed_here(before);
    }
  }
  return levels;
}

}  // namespace

int GraphCut::outside(base::Partition partition) const {
  const auto is_it = [&](const Segment& one) { return one.partition == partition && one.operations.empty(); };
  return static_cast<int>(std::ranges::find_if(segments, is_it) - segments.begin());
}

GraphCut cut(const std::vector<Placed>& operations, const std::vector<OperationOutput>& results, int partitions) {
  const auto levels = latest_levels(operations, results);
  std::map<std::pair<int, base::Partition>, std::vector<int>> runs;  // by level and partition
  for (std::size_t i = 0; i < operations.size(); ++i) {
    runs[{levels[i], operations[i].partition}].push_back(static_cast<int>(i));
  }
  GraphCut made;
  made.segment_of.resize(operations.size());
  for (auto& [key, members] : runs) {
    for (const int member : members) made.segment_of[member] = static_cast<int>(made.segments.size());
    made.segments.push_back({key.second, key.first, std::move(members)});
  }
  const int last = made.segments.empty() ? 0 : made.segments.back().level + 1;
  for (int i = 0; i < partitions; ++i) made.segments.push_back({base::Partition(i), last, {}});

  std::map<OperationOutput, std::map<base::Partition, int>>
      readers;  // the first segment of each partition that reads it
  const auto read = [&](const OperationOutput& value, int segment) {
    const auto partition = made.segments[segment].partition;
    if (operations[value.operation].partition == partition) return;
    const auto [found, is_new] = readers[value].try_emplace(partition, segment);
    if (!is_new) found->second = std::min(found->second, segment);  // they are sorted by level
  };
  for (std::size_t i = 0; i < operations.size(); ++i) {
    for (const OperationOutput& input : operations[i].inputs) read(input, made.segment_of[i]);
  }
  for (int i = 0; i < partitions; ++i) {
    for (const OperationOutput& result : results) read(result, made.outside(base::Partition(i)));
  }
  for (const auto& [value, first] : readers) {
    const auto& gradients = operations[value.operation].gradients;
    const bool differentiable = value.output < static_cast<int>(gradients.size()) && gradients[value.output];
    for (const auto& [partition, reader] : first) {
      const bool inside = !made.segments[reader].operations.empty();
      made.crossings.push_back({value, made.segment_of[value.operation], reader, differentiable && inside});
    }
  }
  return made;
}

}  // namespace lamina::graph
