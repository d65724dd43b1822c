// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "lamina/value/reference_tensor.h"
#include "lamina/value/value.h"

// The two ends of one remote call in autograd.
//
// [Note: differentiable tensors] Both ends number the tensors of a tree that require grad in the order of
// for_each_tensor, each tensor object once. Gradients travel as lists in that order; an undefined tensor is a gradient
// that does not exist, and stays one.
namespace lamina::remote {

using Tensors = std::vector<at::Tensor>;

// The target of one argument's gradient.
struct GradientTarget {
  // kHere: to a local operation, a leaf or the user, which need its value. kRemote: into the backward of a call that
  // lives on `rank`. kCaller: out of this rank, as the gradient of what it was called with. kNowhere: nobody wants it.
  // A gradient that goes to kRemote or kCaller may be a reference: only nodes of ours take those (a reference that
  // reached a leaf would be waited for under a lock that all microbatches share).
  enum class Kind : std::uint8_t { kNowhere, kHere, kRemote, kCaller };
  Kind kind = Kind::kNowhere;
  base::Rank rank;
  value::TensorSpec spec;  // of the argument
};
using GradientTargets = std::vector<GradientTarget>;

struct BackwardOptions {
  bool keep_graph = false;
  bool accumulate = true;  // into the parameters; not where gradients of given tensors are asked for
  // Outputs of whose gradient the caller wants to see all: it has a hook, or is to be kept.
  std::vector<std::int64_t> watched;
  // The leaves whose gradients autograd.grad asks for, as far as this rank knows them; it stays here.
  Tensors asked;
};

// Leaves that a backward has reached, each once, and the gradient of each; undefined for none.
struct LeafGradients {
  Tensors leaves, gradients;
};

// The part of a backward that others wait for, which has run, and what is left of it, to be run once.
using WeightPart = std::function<void()>;
struct InputPart {
  Tensors gradients;  // of the arguments
  WeightPart rest;
};

// The owner's end: the graph of one call, from the arguments to the outputs.
class CalleeGraph {
 public:
  // Makes the differentiable tensors of `arguments` the beginning of a graph. They are no leaves, so that the module
  // may write them in place.
  explicit CalleeGraph(value::Value& arguments);
  ~CalleeGraph();

  void set_outputs(const value::Value& outputs);  // keeps their history, not their values
  bool differentiable() const;
  // For each differentiable argument '1' where an output depends on it, else '0'.
  std::string reached() const;

  // Runs the backward of the outputs with `gradients`, accumulating into the parameters; returns the gradients of the
  // arguments, which may be references where they come straight out of another call. Throws what a node throws.
  // base::UsageError comes where a watched output gets a gradient from another one, which its caller does not see. It
  // also comes where a tensor that is asked for depends only on what is behind the arguments.
  Tensors backward(const Tensors& gradients, const BackwardOptions& options);

  // Runs it in two parts, see [Note: parts of a backward]: now the input part. What is left to be run accumulates into
  // the parameters; it is empty where nothing is, as all of it has run. The graph must not be used again.
  InputPart backward_of_inputs(const Tensors& gradients, const BackwardOptions& options);

  // Runs it too, and accumulates nothing: what each leaf would get goes to `leaves`.
  Tensors collect(const Tensors& gradients, const BackwardOptions& options, LeafGradients& leaves);

 private:
  class Entry;
  struct Holder;  // keeps torch's types out of this header
  void require_usable(const Tensors& gradients, const BackwardOptions& options) const;
  void require_unused(std::int64_t output, const Tensors& gradients) const;
  template <class Run>
  Tensors arrived_in(const Run& run);
  std::unique_ptr<Holder> graph_;
};

// The caller's end: a node whose backward is `run`. It is given the outputs' gradients, which may be references, and
// the targets of its results. `name` and `owner` are the module's.
class CallerGraph {
 public:
  using Backward =
      std::function<Tensors(const Tensors& gradients, const BackwardOptions& options, const GradientTargets& targets)>;

  // A call that is `always` part of a backward runs in one that asks for certain leaves, too: on its owner there are
  // leaves that nobody sees here.
  enum class Part : std::uint8_t { kWhereAsked, kAlways };

  CallerGraph(const value::Value& arguments, std::string name, base::Rank owner, Backward run,
              Part part = Part::kWhereAsked);
  ~CallerGraph();

  // Gives the differentiable tensors of `outputs`, fresh from the wire, this call as their history. What is behind
  // arguments that are not `reached` is no part of it: it would meet a gradient that does not exist.
  void attach(value::Value& outputs, const std::string& reached);

 private:
  class Node;
  struct Holder;
  std::unique_ptr<Holder> node_;
};

// The backward of `tensors` in this thread. Where a gradient is undefined its tensor must be a scalar, and counts as 1.
// All gradients are multiplied by `scale`. Throws base::UsageError for a tensor without graph or a missing gradient.
void run_backward(const Tensors& tensors, const Tensors& gradients, double scale);

// It in two parts: the first has run, with all calls of other ranks; see CalleeGraph::backward_of_inputs().
WeightPart run_input_part(const Tensors& tensors, const Tensors& gradients, double scale);

// The backward of `tensors` in this thread, which accumulates nothing. Calls of other ranks' modules are part of it if
// they are CallerGraph::Part::kAlways. `gradients` and errors as those of run_backward().
LeafGradients collect_backward(const Tensors& tensors, const Tensors& gradients, bool keep_graph);

}  // namespace lamina::remote
