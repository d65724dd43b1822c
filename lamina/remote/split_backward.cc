// SPDX-License-Identifier: Apache-2.0
#include "lamina/remote/split_backward.h"

#include <c10/util/ScopeExit.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/functions/tensor.h>

#include <algorithm>
#include <initializer_list>
#include <memory>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "lamina/base/error.h"

namespace lamina::remote {
namespace {

namespace autograd = torch::autograd;
using NodePtr = value::NodePtr<autograd::Node>;

// Metadata is copied where it is made: it cannot be assigned.
std::uint32_t add_input_like(autograd::Node& node, const autograd::InputMetadata& other) {
  const auto place = node.add_input_metadata(autograd::Node::undefined_input());
  auto* const made = &node.mutable_input_metadata(place);
  std::destroy_at(made);
  std::construct_at(made, other);
  return place;
}

bool contains_any(std::string_view name, std::initializer_list<std::string_view> parts) {
  return std::ranges::any_of(parts, [&](std::string_view part) { return name.find(part) != std::string_view::npos; });
}

bool has_hooks(autograd::Node& node) {
  return !node.pre_hooks().empty() || !node.post_hooks().empty() || !node.tensor_pre_hooks().empty() ||
         !node.retains_grad_hooks().empty();
}

// A derivative of torch's own. (Nodes of Python throw when they are asked whether they can be traced.)
bool is_torchs(autograd::Node& node) { return dynamic_cast<autograd::TraceableFunction*>(&node) != nullptr; }

// Derivatives of recurrent layers compute all their gradients at once.
bool runs_once(autograd::Node& node) {
  return !is_torchs(node) || has_hooks(node) || contains_any(node.name(), {"Rnn", "Lstm"});
}

// A reentrant checkpoint accumulates in a backward of its own. Compiled code may refuse a graph that is kept. A hooked
// call hears of its end by a node that comes last: see [Note: hooked backwards].
bool needs_whole_pass(autograd::Node& node) {
  if (is_torchs(node) || dynamic_cast<autograd::AccumulateGrad*>(&node) != nullptr) return false;
  return contains_any(node.name(), {"CheckpointFunctionBackward", "CompiledFunction", "LaminaCallExit"});
}

// The node of a write to a view holds the derivative of what was written, whose edges have to be its own.
void pass_edges_on(autograd::Node& node) {
  const auto* const write = dynamic_cast<const autograd::CopySlices*>(&node);
  if (write == nullptr || !write->fn) return;
  const auto& edges = node.next_edges();
  for (std::size_t i = 1; i < edges.size(); ++i) write->fn->next_edges()[i] = edges[i];
}

// Gradients and where they go.
struct Roots {
  void add(const autograd::Edge& edge, at::Tensor gradient) {
    if (!edge.is_valid() || !gradient.defined()) return;
    edges.push_back(edge);
    gradients.push_back(std::move(gradient));
  }
  void run(bool keep_graph) const {
    if (edges.empty()) return;
    autograd::Engine::get_default_engine().execute(edges, gradients, keep_graph, /*create_graph=*/false,
                                                   /*accumulate_grad=*/true, {});
  }
  autograd::edge_list edges;
  autograd::variable_list gradients;
};

}  // namespace

void throw_earlier_graph() {
  throw base::UsageError(
      "a gradient flows into an earlier call of a module that runs on another rank, by way of something that the "
      "module kept: let it keep that without its history (detach()), or return it and take it as an argument",
      base::Code{"step-earlier-graph"});
}

// Keeps the gradients that arrive in the input part; they go on to where its edges lead.
class SplitBackward::Kept : public autograd::Node {
 public:
  explicit Kept(const autograd::Node& stands_for) : Node(stands_for.sequence_nr()) {}
  std::string name() const override { return "LaminaKept"; }
  autograd::variable_list apply(autograd::variable_list&& gradients) override {
    if (keeps) arrived = gradients;
    gradients.resize(num_outputs());
    return std::move(gradients);
  }
  autograd::variable_list arrived;
  bool keeps = true;
};

// Stands between the parts, and after them, where a boundary's gradient went in the input part.
class SplitBackward::Past : public autograd::Node {
 public:
  std::string name() const override { return "LaminaPast"; }
  autograd::variable_list apply(autograd::variable_list&&) override { throw_earlier_graph(); }
};

// Finds the leading nodes of a graph.
class SplitBackward::Walk {
 public:
  Walk(const Edges& outputs, const autograd::Node* entry) : leads_{{entry, true}} {
    for (const auto& output : outputs) {
      if (splits_) visit(output);
      while (splits_ && !path_.empty()) go_on();
    }
  }

  bool splits() const { return splits_; }
  bool leads(const autograd::Edge& edge) const { return edge.is_valid() && leads_.at(edge.function.get()); }
  bool is_later(const autograd::Edge& edge) const { return edge.is_valid() && !leads_.at(edge.function.get()); }
  const std::vector<NodePtr>& leading() const { return leading_; }

 private:
  struct Visit {
    NodePtr node;
    std::size_t next = 0;
  };

  void visit(const autograd::Edge& edge) {
    if (!edge.is_valid() || !leads_.try_emplace(edge.function.get(), false).second) return;
    const auto* const outlet = dynamic_cast<const Outlet*>(edge.function.get());
    const bool other_call = outlet != nullptr && outlet->leads() == Outlet::Leads::kToCaller;
    splits_ = !other_call && dynamic_cast<Past*>(edge.function.get()) == nullptr && !needs_whole_pass(*edge.function);
    leads_[edge.function.get()] = outlet != nullptr;
    path_.push_back({edge.function});
  }

  void go_on() {
    auto& [node, next] = path_.back();
    const auto& edges = node->next_edges();
    if (next < edges.size()) return visit(edges[next++]);
    bool& leading = leads_.at(node.get());
    leading = leading || std::ranges::any_of(edges, [&](const auto& edge) { return leads(edge); });
    if (leading) leading_.push_back(std::move(node));
    path_.pop_back();
  }

  std::unordered_map<const autograd::Node*, bool> leads_;
  std::vector<NodePtr> leading_;
  std::vector<Visit> path_;
  bool splits_ = true;
};

// A place where the graph is cut in two: at one node.
struct SplitBackward::Seam {
  // A node that runs once: what its edges of the weight part give is kept behind it.
  static Seam behind(autograd::Node& node, const Walk& walk) {
    Seam seam{value::make_node<Kept>(node)};
    for (auto& edge : node.next_edges()) {
      if (!walk.is_later(edge)) continue;
      const auto place = add_input_like(*seam.kept, edge.function->input_metadata(edge.input_nr));
      seam.later.push_back(std::exchange(edge, {seam.kept, place}));
    }
    return seam;
  }

  // A boundary: what arrives at it is kept before it, and goes on.
  static Seam before(const NodePtr& node, const Walk& walk) {
    Seam seam{value::make_node<Kept>(*node), node};
    autograd::edge_list on;
    for (std::uint32_t i = 0; i < node->num_inputs(); ++i) {
      on.emplace_back(node, add_input_like(*seam.kept, node->input_metadata(i)));
    }
    seam.kept->set_next_edges(std::move(on));
    for (auto& edge : node->next_edges()) {
      seam.later.push_back(walk.is_later(edge) ? std::exchange(edge, {}) : autograd::Edge());
    }
    return seam;
  }

  // The input part is over: nothing gets there any more.
  void seal(const value::NodePtr<Past>& past) {
    if (!boundary) return;
    for (auto& edge : boundary->next_edges()) {
      if (!edge.is_valid()) continue;
      const auto place = add_input_like(*past, edge.function->input_metadata(edge.input_nr));
      edge = {past, place};
    }
  }

  // Opens the way of the weight part, and closes it.
  void exchange_edges() {
    if (boundary) {
      boundary->next_edges().swap(later);
    } else {
      kept->next_edges() = later;
    }
  }

  value::NodePtr<Kept> kept;
  NodePtr boundary;           // nullptr: of a node that runs once
  autograd::edge_list later;  // of the boundary, or of `kept`
};

SplitBackward::SplitBackward(Edges outputs, const Walk& walk)
    : outputs_(std::move(outputs)), later_outputs_(outputs_.size()) {
  std::unordered_map<const autograd::Node*, NodePtr> before;
  for (const auto& node : walk.leading()) {
    if (auto* const call = dynamic_cast<Outlet*>(node.get())) call->in_input_part = true;
    const bool is_seam = std::ranges::any_of(node->next_edges(), [&](const auto& edge) { return walk.is_later(edge); });
    if (is_seam && !runs_once(*node)) {
      seams_.push_back(Seam::before(node, walk));
      before[node.get()] = seams_.back().kept;
      continue;
    }
    if (is_seam) seams_.push_back(Seam::behind(*node, walk));
    only_leading_.push_back(node);
  }
  const auto redirect = [&](autograd::Edge& edge) {
    const auto found = before.find(edge.function.get());
    if (found != before.end()) edge.function = found->second;
  };
  for (const auto& node : walk.leading()) {
    std::ranges::for_each(node->next_edges(), redirect);
    pass_edges_on(*node);
  }
  for (std::size_t i = 0; i < outputs_.size(); ++i) {
    if (walk.is_later(outputs_[i])) later_outputs_[i] = std::exchange(outputs_[i], {});
    redirect(outputs_[i]);
  }
}

SplitBackward::~SplitBackward() = default;

std::unique_ptr<SplitBackward> SplitBackward::of(Edges outputs, const autograd::Node* entry) {
  const Walk walk(outputs, entry);
  if (!walk.splits()) return nullptr;
  return std::unique_ptr<SplitBackward>(new SplitBackward(std::move(outputs), walk));
}

void SplitBackward::run_input_part(const std::vector<at::Tensor>& gradients) {
  Roots roots;
  given_.resize(gradients.size());
  for (std::size_t i = 0; i < gradients.size(); ++i) {
    roots.add(outputs_[i], gradients[i]);
    if (later_outputs_[i].is_valid()) given_[i] = gradients[i];
  }
  const auto over = c10::make_scope_exit([this] { seal(); });
  roots.run(/*keep_graph=*/true);
}

// Others may hold these nodes: they are to find what a backward leaves.
void SplitBackward::seal() {
  const auto past = value::make_node<Past>();
  for (auto& seam : seams_) seam.seal(past);
  for (const auto& node : std::exchange(only_leading_, {})) node->release_variables();
  outputs_.clear();
  std::erase_if(seams_, [](const Seam& seam) {
    return std::ranges::none_of(seam.kept->arrived, [](const auto& gradient) { return gradient.defined(); });
  });
}

bool SplitBackward::has_weight_part() const {
  return !seams_.empty() || std::ranges::any_of(given_, [](const auto& gradient) { return gradient.defined(); });
}

void SplitBackward::run_weight_part() {
  Roots roots;
  for (std::size_t i = 0; i < given_.size(); ++i) roots.add(later_outputs_[i], std::move(given_[i]));
  for (auto& seam : seams_) {
    seam.kept->keeps = false;
    auto arrived = std::exchange(seam.kept->arrived, {});
    for (std::uint32_t i = 0; i < arrived.size(); ++i) roots.add({seam.kept, i}, std::move(arrived[i]));
    seam.exchange_edges();
  }
  const auto over = c10::make_scope_exit([this] {
    for (auto& seam : seams_) seam.exchange_edges();
  });
  roots.run(/*keep_graph=*/false);
}

}  // namespace lamina::remote
