// SPDX-License-Identifier: Apache-2.0
#include "lamina/remote/graph.h"

#include <ATen/ops/full.h>
#include <ATen/ops/mul.h>
#include <c10/core/GradMode.h>
#include <c10/util/ScopeExit.h>
#include <c10/util/strides.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <set>
#include <unordered_set>

#include "lamina/base/error.h"
#include "lamina/base/str.h"
#include "lamina/remote/split_backward.h"
#include "lamina/runtime/backward_here.h"
#include "lamina/value/torch_version.h"

namespace lamina::remote {
namespace {

namespace autograd = torch::autograd;

// See [Note: differentiable tensors].
Tensors differentiable_tensors(const value::Value& tree) {
  Tensors found;
  std::unordered_set<const void*> seen;
  value::for_each_tensor(tree, [&](const at::Tensor& tensor) {
    if (tensor.defined() && tensor.requires_grad() && seen.insert(tensor.unsafeGetTensorImpl()).second) {
      found.push_back(tensor);
    }
  });
  return found;
}

autograd::edge_list gradient_edges(const Tensors& tensors) {
  autograd::edge_list edges;
  for (const auto& tensor : tensors) edges.push_back(autograd::impl::gradient_edge(tensor));
  return edges;
}

// The gradients of `asked`; without any they are accumulated where they belong.
Tensors execute(const autograd::edge_list& outputs, const Tensors& gradients, const BackwardOptions& options,
                const autograd::edge_list& asked) {
  autograd::edge_list roots;
  autograd::variable_list given;
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    if (!gradients[i].defined()) continue;
    roots.push_back(outputs[i]);
    given.push_back(gradients[i]);
  }
  if (roots.empty()) return Tensors(asked.size());
  return autograd::Engine::get_default_engine().execute(roots, given, options.keep_graph, /*create_graph=*/false,
                                                        options.accumulate, asked);
}

// The gradient that a backward begins with. Looks at no value: that of a reference may be on its way.
at::Tensor seed(const at::Tensor& tensor, double scale) { return at::full(tensor.sizes(), scale, tensor.options()); }

// Visits every edge behind `open`, those included; several ways to one node are one.
template <class Visit>
void for_each_edge(autograd::edge_list open, const Visit& visit) {
  std::unordered_set<const autograd::Node*> seen;
  while (!open.empty()) {
    const auto edge = std::move(open.back());
    open.pop_back();
    visit(edge);
    if (!edge.is_valid() || !seen.insert(edge.function.get()).second) continue;
    const auto& next = edge.function->next_edges();
    open.insert(open.end(), next.begin(), next.end());
  }
}

// An end of the graph that nothing flows into. A backward that asks for certain leaves runs the nodes before them
// alone: asked for this one, it runs the node before it.
class Sink : public autograd::Node {
 public:
  Sink() { add_input_metadata(undefined_input()); }
  std::string name() const override { return "LaminaSink"; }
  autograd::variable_list apply(autograd::variable_list&&) override { return {}; }
};

// Runs a backward that accumulates nothing. Returns the gradients of the leaves that it reaches, then those of `also`.
Tensors collect(const autograd::edge_list& outputs, const Tensors& gradients, bool keep_graph,
                const autograd::edge_list& also, LeafGradients& leaves) {
  autograd::edge_list asked, sinks;
  std::unordered_set<const autograd::Node*> seen;
  for_each_edge(outputs, [&](const autograd::Edge& edge) {
    if (!edge.is_valid() || !seen.insert(edge.function.get()).second) return;
    if (const auto* leaf = dynamic_cast<const autograd::AccumulateGrad*>(edge.function.get())) {
      leaves.leaves.push_back(leaf->variable);
      asked.push_back(edge);
    } else if (dynamic_cast<const Sink*>(edge.function.get()) != nullptr) {
      sinks.push_back(edge);
    }
  });
  const auto of_leaves = static_cast<std::ptrdiff_t>(asked.size());
  asked.insert(asked.end(), also.begin(), also.end());
  asked.insert(asked.end(), sinks.begin(), sinks.end());
  if (asked.empty()) return {};  // nobody asks for anything
  const runtime::BackwardHere here;
  auto found = execute(outputs, gradients, {.keep_graph = keep_graph, .accumulate = false}, asked);
  leaves.gradients.insert(leaves.gradients.end(), found.begin(), found.begin() + of_leaves);
  return {found.begin() + of_leaves, found.begin() + of_leaves + static_cast<std::ptrdiff_t>(also.size())};
}

WeightPart rest_of(const std::shared_ptr<SplitBackward>& split) {
  if (!split->has_weight_part()) return {};
  return [split] { split->run_weight_part(); };
}

// State of the backward that this thread is in.
BackwardOptions current_options() {
  const auto* asked = autograd::get_current_graph_task_exec_info();
  BackwardOptions options{autograd::get_current_graph_task_keep_graph(), asked == nullptr || asked->empty(), {}, {}};
  if (options.accumulate) return options;
  for (const auto& [node, info] : *asked) {
    const auto* leaf = info.captures_ ? dynamic_cast<const autograd::AccumulateGrad*>(node) : nullptr;
    if (leaf != nullptr) options.asked.push_back(leaf->variable);
  }
  return options;
}

}  // namespace

// A node that takes references for gradients.
class TakesReferences : public Outlet {
 public:
  // The target of the gradient that flows into it.
  virtual GradientTarget target() const = 0;
  Leads leads() const override {
    return target().kind == GradientTarget::Kind::kCaller ? Leads::kToCaller : Leads::kToCall;
  }
};

// The beginning of the callee's graph: keeps the gradients that arrive there.
class CalleeGraph::Entry : public TakesReferences {
 public:
  std::string name() const override { return "LaminaArguments"; }
  GradientTarget target() const override { return {GradientTarget::Kind::kCaller, {}, {}}; }
  autograd::variable_list apply(autograd::variable_list&& gradients) override {
    if (!awaits) throw_earlier_graph();
    arrived = std::move(gradients);
    return {};
  }
  Tensors arrived;
  bool awaits = false;  // the backward of its own call runs
};

struct CalleeGraph::Holder {
  value::NodePtr<Entry> entry = value::make_node<Entry>();
  autograd::edge_list outputs;

  autograd::edge_list arguments() const {
    autograd::edge_list edges;
    for (std::uint32_t i = 0; i < entry->num_inputs(); ++i) edges.emplace_back(entry, i);
    return edges;
  }
};

CalleeGraph::CalleeGraph(value::Value& arguments) : graph_(std::make_unique<Holder>()) {
  for (at::Tensor& tensor : differentiable_tensors(arguments)) {
    tensor.set_requires_grad(false);
    autograd::create_gradient_edge(tensor, graph_->entry);
  }
}
CalleeGraph::~CalleeGraph() = default;

void CalleeGraph::set_outputs(const value::Value& outputs) {
  graph_->outputs = gradient_edges(differentiable_tensors(outputs));
}

bool CalleeGraph::differentiable() const { return !graph_->outputs.empty(); }

std::string CalleeGraph::reached() const {
  std::string reached(graph_->entry->num_inputs(), '0');
  for_each_edge(graph_->outputs, [&](const autograd::Edge& edge) {
    if (edge.function.get() == graph_->entry.get()) reached[edge.input_nr] = '1';
  });
  return reached;
}

void CalleeGraph::require_unused(std::int64_t output, const Tensors& gradients) const {
  const auto& watched = graph_->outputs.at(output);
  autograd::edge_list behind;
  for (std::size_t i = 0; i < gradients.size(); ++i) {
    if (!gradients[i].defined() || graph_->outputs[i] == watched) continue;
    behind.push_back(graph_->outputs[i]);
  }
  for_each_edge(behind, [&](const autograd::Edge& edge) {
    if (!(edge == watched)) return;
    throw base::UsageError(
        "a hook on, or retain_grad() of, a tensor that a module on another rank returned: other results of that module "
        "depend on it, and what they add to its gradient is not seen here; compute them where the hook is, or return a "
        "clone of it",
        base::Code{"step-gradient-hook"});
  });
}

void CalleeGraph::require_usable(const Tensors& gradients, const BackwardOptions& options) const {
  base::internal_check(gradients.size() == graph_->outputs.size(), "gradients that are not those of the outputs");
  for (const auto output : options.watched) require_unused(output, gradients);
}

// The gradients that arrive at the arguments while `run` runs.
template <class Run>
Tensors CalleeGraph::arrived_in(const Run& run) {
  auto& entry = *graph_->entry;
  entry.arrived.assign(entry.num_inputs(), at::Tensor());
  entry.awaits = true;
  const auto over = c10::make_scope_exit([&] { entry.awaits = false; });
  run();
  return std::exchange(entry.arrived, {});
}

Tensors CalleeGraph::backward(const Tensors& gradients, const BackwardOptions& options) {
  require_usable(gradients, options);
  if (options.accumulate) return arrived_in([&] { execute(graph_->outputs, gradients, options, {}); });
  for_each_edge(graph_->outputs, [&](const autograd::Edge& edge) {
    const auto* leaf = dynamic_cast<const autograd::AccumulateGrad*>(edge.function.get());
    const auto is_it = [&](const at::Tensor& tensor) { return tensor.is_same(leaf->variable); };
    if (leaf == nullptr || std::ranges::none_of(options.asked, is_it)) return;
    throw base::UsageError(
        "autograd.grad(), or backward(inputs=...), of a parameter that a module uses which another rank calls: that "
        "part of its gradient does not reach the caller; use model.backward() and read .grad on the rank that owns it",
        base::Code{"step-autograd-grad"});
  });
  if (graph_->entry->num_inputs() == 0) return {};  // nobody asks for anything
  return execute(graph_->outputs, gradients, options, graph_->arguments());
}

InputPart CalleeGraph::backward_of_inputs(const Tensors& gradients, const BackwardOptions& options) {
  const bool may_split = options.accumulate && !options.keep_graph;
  const std::shared_ptr split = may_split ? SplitBackward::of(graph_->outputs, graph_->entry.get()) : nullptr;
  if (!split) return {backward(gradients, options), {}};
  require_usable(gradients, options);
  auto arrived = arrived_in([&] { split->run_input_part(gradients); });
  graph_->outputs.clear();
  return {std::move(arrived), rest_of(split)};
}

Tensors CalleeGraph::collect(const Tensors& gradients, const BackwardOptions& options, LeafGradients& leaves) {
  require_usable(gradients, options);
  return remote::collect(graph_->outputs, gradients, options.keep_graph, graph_->arguments(), leaves);
}

class CallerGraph::Node : public TakesReferences {
 public:
  Node(std::string name, base::Rank owner, Backward run)
      : name_(std::move(name)), owner_(owner), run_(std::move(run)) {}

  std::string name() const override { return "LaminaCall(" + name_ + ")"; }
  GradientTarget target() const override { return {GradientTarget::Kind::kRemote, owner_, {}}; }

  autograd::variable_list apply(autograd::variable_list&& gradients) override {
    Tensors result;
    value::for_user([&] {
      require_no_graph();
      auto options = current_options();
      if (in_input_part) options.keep_graph = false;
      options.watched = watched();
      result = run_(gradients, options, targets());
    });
    base::internal_check(result.size() == arguments, "gradients that are not those of the arguments");
    result.resize(num_outputs());  // none for a sink
    return result;
  }

  std::vector<c10::weak_intrusive_ptr<c10::TensorImpl>> results;  // in the order of their gradients
  std::size_t arguments = 0;

 private:
  // A hook is found by its tensor, and not seen when that is gone.
  std::vector<std::int64_t> watched() {
    std::set<std::int64_t> found;
    for (const auto& [output, hook] : retains_grad_hooks()) found.insert(static_cast<std::int64_t>(output));
    if (tensor_pre_hooks().empty()) return {found.begin(), found.end()};
    for (std::size_t i = 0; i < results.size(); ++i) {
      const auto tensor = results[i].lock();
      const auto* meta = tensor ? autograd::impl::get_autograd_meta(at::Tensor(tensor)) : nullptr;
      const bool hooked = meta != nullptr && (meta->cpp_hooks_list_ != nullptr || !meta->hooks_.empty());
      if (hooked) found.insert(static_cast<std::int64_t>(i));
    }
    return {found.begin(), found.end()};
  }

  void require_no_graph() const {
    if (!at::GradMode::is_enabled()) return;
    throw base::UsageError(base::str("create_graph=True through ", name_,
                                     ", which runs on another rank, is not supported; place it on the caller's rank"),
                           base::Code{"step-transform"});
  }

  GradientTargets targets() const {
    GradientTargets targets;
    for (const auto& edge : next_edges()) targets.push_back(target_of(edge));
    targets.resize(arguments);
    return targets;
  }

  static GradientTarget target_of(const autograd::Edge& edge) {
    if (!edge.is_valid()) return {};
    const auto* ours = dynamic_cast<const TakesReferences*>(edge.function.get());
    GradientTarget target = ours ? ours->target() : GradientTarget{GradientTarget::Kind::kHere, {}, {}};
    const auto& argument = edge.function->input_metadata(edge.input_nr);
    for (const auto& size : argument.shape_as_dim_vector()) target.spec.sizes.push_back(size.expect_int());
    const auto strides = c10::contiguous_strides(target.spec.sizes);
    target.spec.strides.assign(strides.begin(), strides.end());
    target.spec.dtype = c10::typeMetaToScalarType(argument.dtype());
    target.spec.device = argument.device();
    return target;
  }

  const std::string name_;
  const base::Rank owner_;
  const Backward run_;
};

struct CallerGraph::Holder {
  value::NodePtr<Node> node;
  Part part = Part::kWhereAsked;
  autograd::edge_list arguments;
};

CallerGraph::CallerGraph(const value::Value& arguments, std::string name, base::Rank owner, Backward run, Part part)
    : node_(std::make_unique<Holder>(value::make_node<Node>(std::move(name), owner, std::move(run)), part)) {
  node_->arguments = gradient_edges(differentiable_tensors(arguments));
}
CallerGraph::~CallerGraph() = default;

void CallerGraph::attach(value::Value& outputs, const std::string& reached) {
  base::internal_check(reached.size() == node_->arguments.size(), "an answer about other arguments");
  for (std::size_t i = 0; i < reached.size(); ++i) {
    if (reached[i] == '0') node_->arguments[i] = {};
  }
  node_->node->arguments = node_->arguments.size();
  if (node_->part == Part::kAlways) node_->arguments.emplace_back(value::make_node<Sink>(), 0);
  node_->node->set_next_edges(std::move(node_->arguments));
  for (at::Tensor& tensor : differentiable_tensors(outputs)) {
    tensor.set_requires_grad(false);
    autograd::create_gradient_edge(tensor, node_->node);
    node_->node->results.emplace_back(tensor.getIntrusivePtr());
  }
}

namespace {

// The gradients that a backward of `tensors` begins with.
Tensors seeds(const Tensors& tensors, const Tensors& gradients, double scale) {
  Tensors scaled;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const at::Tensor& tensor = tensors[i];
    if (!tensor.defined() || !tensor.requires_grad()) {
      throw base::UsageError(base::str("backward of tensor ", i,
                                       ", which does not require grad and has no graph: give it the loss as the model "
                                       "computed it, before detach() or item()"));
    }
    const bool given = i < gradients.size() && gradients[i].defined();
    if (!given && tensor.numel() != 1) {
      throw base::UsageError(base::str("backward of tensor ", i, " of shape ", tensor.sizes(),
                                       " needs its gradient: only a scalar's may be left out"));
    }
    scaled.push_back(given ? (scale == 1 ? gradients[i] : at::mul(gradients[i], scale)) : seed(tensor, scale));
  }
  return scaled;
}

}  // namespace

void run_backward(const Tensors& tensors, const Tensors& gradients, double scale) {
  at::NoGradGuard no_grad;
  const auto given = seeds(tensors, gradients, scale);
  execute(gradient_edges(tensors), given, {}, {});
}

WeightPart run_input_part(const Tensors& tensors, const Tensors& gradients, double scale) {
  at::NoGradGuard no_grad;
  const auto given = seeds(tensors, gradients, scale);
  const auto outputs = gradient_edges(tensors);
  const std::shared_ptr split = SplitBackward::of(outputs, nullptr);
  if (!split) {
    execute(outputs, given, {}, {});
    return {};
  }
  split->run_input_part(given);
  return rest_of(split);
}

LeafGradients collect_backward(const Tensors& tensors, const Tensors& gradients, bool keep_graph) {
  at::NoGradGuard no_grad;
  const auto given = seeds(tensors, gradients, 1);
  LeafGradients found;
  collect(gradient_edges(tensors), given, keep_graph, {}, found);
  return found;
}

}  // namespace lamina::remote
