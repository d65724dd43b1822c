// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/csrc/autograd/function.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "lamina/value/torch_version.h"

namespace lamina::remote {

// A node by which gradients leave this rank: at the arguments of a call that it serves, or to a call of another rank.
class Outlet : public torch::autograd::Node {
 public:
  enum class Leads : std::uint8_t { kToCaller, kToCall };
  virtual Leads leads() const = 0;
  // The pass that runs it keeps the graph for the weight part alone, and for no other backward.
  bool in_input_part = false;
};

// Throws base::UsageError.
[[noreturn]] void throw_earlier_graph();

// [Note: parts of a backward] Another rank waits for the gradients of a call's arguments, and nobody for those of its
// parameters. So a backward may be run in two parts: the input part, with all calls of other ranks, and any time later
// in the step the weight part.
//
// A node leads where a gradient gets by it to the call's arguments, or to a call of another rank. All others belong to
// the weight part. A leading node that has edges to those, too, is a boundary: it runs in both parts, with the edges of
// that part, and its derivative computes only what has an edge. In between are kept the gradients that have arrived at
// boundaries, and what these have saved. Other leading nodes release that. Each part is one pass of autograd's engine,
// which takes of the nodes that are ready the one made last. A node that keeps gradients counts as made with the one
// that it stands for. So sums have the order, and the bits, of the whole backward.
//
// Some leading nodes run once, with all their edges, in the input part, and what they give parameters is kept. They are
// not of torch's derivatives, have hooks, or compute all their gradients at once.
class SplitBackward {
 public:
  using Edges = torch::autograd::edge_list;

  // The backward of these outputs of a graph, in which arguments begin at `entry`; nullptr: there are none. Nothing
  // where it cannot be split: it reaches the graph of another call, or a node that needs the whole pass.
  static std::unique_ptr<SplitBackward> of(Edges outputs, const torch::autograd::Node* entry);
  ~SplitBackward();
  SplitBackward(const SplitBackward&) = delete;

  // Each once, in this order. They throw what a node throws.
  void run_input_part(const std::vector<at::Tensor>& gradients);  // of the outputs
  bool has_weight_part() const;
  void run_weight_part();

 private:
  class Kept;
  class Past;
  struct Seam;
  class Walk;
  SplitBackward(Edges outputs, const Walk& walk);
  void seal();

  Edges outputs_, later_outputs_;                                    // by output; invalid: of the other part
  std::vector<at::Tensor> given_;                                    // to the later outputs
  std::vector<value::NodePtr<torch::autograd::Node>> only_leading_;  // leading nodes that are no boundaries
  std::vector<Seam> seams_;
};

}  // namespace lamina::remote
