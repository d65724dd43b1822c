// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <compare>
#include <vector>

#include "lamina/base/ids.h"

// A graph of operations over several ranks.
namespace lamina::graph {

// An output of an operation.
struct OperationOutput {
  int operation = 0;
  int output = 0;

  friend constexpr auto operator<=>(const OperationOutput&, const OperationOutput&) = default;
};

// An operation that has its place. Operations are numbered in an order in which each follows what it reads.
struct Placed {
  base::Partition partition;
  std::vector<OperationOutput> inputs;
  std::vector<int> after;         // operations that have to be over before it, where they are of its partition
  std::vector<bool> gradients{};  // per output: gradients come back to it from those who read it
};

// [Note: segments] The level of an operation is the highest of those it reads, and one more where one of these is on
// another partition. What only operations of its own partition read goes as late as the first of them. The operations
// of one partition and one level are a segment, which runs as a whole. Values go from lower levels to higher ones, so
// segments wait for each other in no circle. A microbatch that comes back to a partition has another segment there.
//
// The program outside the model runs on every partition, as one last segment without operations. It reads the results.
// Their gradients are taken where they were made: each partition has its own.
struct Segment {
  base::Partition partition;
  int level = 0;
  std::vector<int> operations;  // in their order; none: the outside
};

// A value that another partition reads. It is sent once, to the first segment there that reads it.
struct Crossing {
  OperationOutput value;
  int maker = 0;  // segments
  int reader = 0;
  bool gradient = false;  // comes back
};

struct GraphCut {
  std::vector<Segment> segments;    // by level; then the outside of each partition
  std::vector<int> segment_of;      // per operation
  std::vector<Crossing> crossings;  // in the order of their values, then of their readers

  int outside(base::Partition partition) const;  // its segment
};

GraphCut cut(const std::vector<Placed>& operations, const std::vector<OperationOutput>& results, int partitions);

}  // namespace lamina::graph
