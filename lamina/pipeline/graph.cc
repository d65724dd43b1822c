// SPDX-License-Identifier: Apache-2.0
#include "lamina/pipeline/graph.h"

#include <ATen/ops/full_like.h>
#include <ATen/ops/mul.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>

#include <unordered_set>

#include "lamina/base/error.h"
#include "lamina/base/str.h"

namespace lamina::pipeline {
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

void execute(const Tensors& tensors, const Tensors& gradients, bool keep_graph) {
  autograd::edge_list roots;
  autograd::variable_list given;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    if (!gradients[i].defined()) continue;
    roots.push_back(autograd::impl::gradient_edge(tensors[i]));
    given.push_back(gradients[i]);
  }
  if (roots.empty()) return;
  autograd::Engine::get_default_engine().execute(roots, given, keep_graph, /*create_graph=*/false,
                                                 /*accumulate_grad=*/true);
}

}  // namespace

// Where the callee's graph begins: keeps what arrives there.
class CalleeGraph::Entry : public autograd::Node {
 public:
  std::string name() const override { return "LaminaArguments"; }
  autograd::variable_list apply(autograd::variable_list&& gradients) override {
    arrived = std::move(gradients);
    return {};
  }
  Tensors arrived;
};

struct CalleeGraph::Holder {
  c10::intrusive_ptr<Entry> node;
};

CalleeGraph::CalleeGraph(value::Value& arguments) : entry_(std::make_unique<Holder>(c10::make_intrusive<Entry>())) {
  for (at::Tensor& tensor : differentiable_tensors(arguments)) {
    tensor.set_requires_grad(false);
    autograd::create_gradient_edge(tensor, entry_->node);
  }
}
CalleeGraph::~CalleeGraph() = default;

void CalleeGraph::set_outputs(const value::Value& outputs) { outputs_ = differentiable_tensors(outputs); }

Tensors CalleeGraph::backward(const Tensors& gradients, bool keep_graph) {
  if (gradients.size() != outputs_.size()) throw base::FormatError("gradients that are not those of the outputs");
  auto& entry = *entry_->node;
  entry.arrived.assign(entry.num_inputs(), at::Tensor());
  execute(outputs_, gradients, keep_graph);
  return std::exchange(entry.arrived, {});
}

class CallerGraph::Node : public autograd::Node {
 public:
  Node(std::string name, Backward run) : name_(std::move(name)), run_(std::move(run)) {}

  std::string name() const override { return "LaminaCall(" + name_ + ")"; }
  autograd::variable_list apply(autograd::variable_list&& gradients) override {
    if (at::GradMode::is_enabled()) {
      throw base::UsageError(
          base::str("create_graph=True through ", name_,
                    ", which runs on another rank, is not supported; place it on the caller's rank"));
    }
    auto result = run_(gradients, autograd::get_current_graph_task_keep_graph());
    if (result.size() != num_outputs()) throw base::FormatError("gradients that are not those of the arguments");
    return result;
  }

 private:
  const std::string name_;
  const Backward run_;
};

struct CallerGraph::Holder {
  c10::intrusive_ptr<Node> node;
};

CallerGraph::CallerGraph(const value::Value& arguments, std::string name, Backward run)
    : node_(std::make_unique<Holder>(c10::make_intrusive<Node>(std::move(name), std::move(run)))) {
  autograd::edge_list edges;
  for (const at::Tensor& tensor : differentiable_tensors(arguments))
    edges.push_back(autograd::impl::gradient_edge(tensor));
  node_->node->set_next_edges(std::move(edges));
}
CallerGraph::~CallerGraph() = default;

void CallerGraph::attach(value::Value& outputs) {
  for (at::Tensor& tensor : differentiable_tensors(outputs)) {
    tensor.set_requires_grad(false);
    autograd::create_gradient_edge(tensor, node_->node);
  }
}

void run_backward(const Tensors& tensors, const Tensors& gradients, double scale) {
  at::NoGradGuard no_grad;
  Tensors scaled;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const at::Tensor& tensor = tensors[i];
    if (!tensor.defined() || !tensor.requires_grad()) {
      throw base::UsageError(base::str("backward of tensor ", i, ", which does not require grad and has no graph"));
    }
    const bool given = i < gradients.size() && gradients[i].defined();
    if (!given && tensor.numel() != 1) {
      throw base::UsageError(base::str("backward of tensor ", i, " of shape ", tensor.sizes(),
                                       " needs its gradient: only a scalar's may be left out"));
    }
    scaled.push_back(given ? (scale == 1 ? gradients[i] : at::mul(gradients[i], scale)) : at::full_like(tensor, scale));
  }
  execute(tensors, scaled, /*keep_graph=*/false);
}

}  // namespace lamina::pipeline
