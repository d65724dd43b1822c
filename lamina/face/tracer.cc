// SPDX-License-Identifier: Apache-2.0
#include "lamina/face/tracer.h"

#include <ATen/record_function.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <chrono>
#include <limits>
#include <unordered_set>

#include "lamina/face/calls.h"
#include "lamina/pipeline/process_state.h"

namespace lamina::face {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kRuns = 4;  // the first, which finds caches cold, does not count
constexpr auto kEnough = std::chrono::seconds(10);

class Recording;
thread_local Recording* recording = nullptr;

std::int64_t bytes_of(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.numel() * static_cast<std::int64_t>(tensor.element_size()) : 0;
}

template <class Visit>
void for_each_tensor_of(const c10::IValue& value, const Visit& visit) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) visit(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorVector()) {
      if (tensor.defined()) visit(tensor);
    }
  }
}

const void* memory_of(const at::Tensor& tensor) {
  return tensor.has_storage() ? tensor.storage().unsafeGetStorageImpl() : nullptr;
}

// One run: what happens belongs to the innermost node that runs.
class Recording : public Router {
 public:
  explicit Recording(const ModuleTree& tree)
      : tree_(tree),
        costs(tree.nodes().size()),
        outer_(router()),
        handle_(at::addThreadLocalCallback(at::RecordFunctionCallback(&begins, &ends)
                                               .needsInputs(true)
                                               .needsOutputs(true)
                                               .scopes({at::RecordScope::FUNCTION}))) {
    recording = this;
    set_router(this);
    push(0);
  }
  ~Recording() override {
    set_router(outer_);
    recording = nullptr;
    at::removeCallback(handle_);
  }

  std::optional<Place> find(const torch::nn::Module* module) override {
    const int node = tree_.node(module);
    if (recording != this || node < 0) return std::nullopt;
    return Place{this, base::ModuleId(node), /*elsewhere=*/false};
  }
  value::Value call(base::ModuleId, std::int64_t, value::Value) override { return {}; }  // nothing is elsewhere

  std::unique_ptr<Scope> enter(base::ModuleId id) override {
    push(static_cast<int>(id.value));
    return std::make_unique<Popped>(*this);
  }
  bool wants_results() const override { return true; }
  void returned(base::ModuleId id, const value::Value& result) override {
    auto& cost = costs_of(static_cast<int>(id.value));
    value::for_each_tensor(result, [&](const at::Tensor& tensor) { cost.output_bytes += bytes_of(tensor); });
  }

  std::vector<Cost> finish() {
    pass_time();
    return std::move(costs);
  }

 private:
  struct Popped : Scope {
    explicit Popped(Recording& run) : run(run) {}
    ~Popped() override {
      run.pass_time();
      run.stack_.pop_back();
    }
    Recording& run;
  };

  Cost& costs_of(int node) { return costs[node]; }

  void push(int node) {
    pass_time();
    stack_.push_back(node);
    if (!costs[node].order) costs[node].order = calls_++;
  }

  void pass_time() {
    const auto now = Clock::now();
    if (!stack_.empty())
      costs[stack_.back()].forward_us += std::chrono::duration<double, std::micro>(now - since_).count();
    since_ = now;
  }

  static std::unique_ptr<at::ObserverContext> begins(const at::RecordFunction& operation) {
    if (recording != nullptr) recording->note_inputs(operation);
    return nullptr;
  }
  static void ends(const at::RecordFunction& operation, at::ObserverContext*) {
    if (recording != nullptr) recording->note_outputs(operation);
  }

  void note_inputs(const at::RecordFunction& operation) {
    if (depth_++ == 0) counted_.clear();
    for (const c10::IValue& input : operation.inputs()) {
      for_each_tensor_of(input, [&](const at::Tensor& tensor) {
        counted_.insert(memory_of(tensor));
        const auto holders = tree_.holders(tensor);
        if (std::ranges::find(holders, stack_.back()) != holders.end()) return;
        costs[stack_.back()].reads.insert(holders.begin(), holders.end());
      });
    }
  }

  // What is neither a view nor written in place, once where one operation is made of others.
  void note_outputs(const at::RecordFunction& operation) {
    --depth_;
    for (const c10::IValue& output : operation.outputs()) {
      for_each_tensor_of(output, [&](const at::Tensor& tensor) {
        if (counted_.insert(memory_of(tensor)).second) costs[stack_.back()].activation_bytes += bytes_of(tensor);
      });
    }
  }

  const ModuleTree& tree_;
  std::vector<Cost> costs;
  Router* const outer_;
  const at::CallbackHandle handle_;
  std::vector<int> stack_;
  Clock::time_point since_;
  int calls_ = 0;
  int depth_ = 0;
  std::unordered_set<const void*> counted_;  // memory that the operation got or made
};

// The model's buffers and the process's random numbers, put back at the end.
class Undisturbed {
 public:
  explicit Undisturbed(const ModuleTree& tree) : tree_(tree), state_(pipeline::ProcessState::current()) {
    for (const auto& buffer : tree.buffers()) values_.push_back(buffer.tensor.detach().clone());
  }
  ~Undisturbed() {
    state_.swap();
    for (std::size_t i = 0; i < values_.size(); ++i) {
      if (!values_[i].equal(tree_.buffers()[i].tensor)) tree_.buffers()[i].tensor.detach().copy_(values_[i]);
    }
  }
  Undisturbed(const Undisturbed&) = delete;

 private:
  const ModuleTree& tree_;
  pipeline::ProcessState state_;
  std::vector<at::Tensor> values_;
};

std::vector<Cost> run(const ModuleTree& tree, const Example& example) {
  value::Value arguments = example.arguments;
  value::for_each_tensor(arguments, [](at::Tensor& tensor) {
    if (tensor.defined()) tensor = tensor.detach().clone();
  });
  Recording one(tree);
  call_kind(example.kind)(*tree.nodes()[0].module, std::move(arguments));
  return one.finish();
}

// Parents before children, children in the order of their first calls.
void visit(const ModuleTree& tree, const std::optional<std::vector<Cost>>& costs, int node, std::vector<int>& order) {
  order.push_back(node);
  std::vector<int> children;
  for (int other = 1; other < tree.size(); ++other) {
    if (tree.nodes()[other].parent == node) children.push_back(other);
  }
  const auto called = [&](int child) { return costs ? (*costs)[child].order.value_or(tree.size()) : 0; };
  std::ranges::stable_sort(children, {}, called);
  for (const int child : children) visit(tree, costs, child, order);
}

}  // namespace

std::vector<Cost> trace(const ModuleTree& tree, const Example& example) {
  const at::NoGradGuard no_grad;
  const Undisturbed undisturbed(tree);
  const auto began = Clock::now();
  std::vector<Cost> costs = run(tree, example);
  for (auto& cost : costs) cost.forward_us = std::numeric_limits<double>::infinity();
  for (int i = 1; i < kRuns && (i < 2 || Clock::now() - began < kEnough); ++i) {
    const auto again = run(tree, example);
    for (std::size_t node = 0; node < costs.size(); ++node) {
      costs[node].forward_us = std::min(costs[node].forward_us, again[node].forward_us);
    }
  }
  return costs;
}

std::pair<plan::ModuleTree, std::vector<int>> planned_tree(const ModuleTree& tree,
                                                           const std::optional<std::vector<Cost>>& costs) {
  std::vector<int> order;
  visit(tree, costs, 0, order);
  std::vector<int> place(order.size());
  for (std::size_t row = 0; row < order.size(); ++row) place[order[row]] = static_cast<int>(row);
  plan::ModuleTree rows;
  for (const int node : order) {
    const auto& own = tree.nodes()[node];
    plan::Node row;
    row.parent = own.parent < 0 ? -1 : place[own.parent];
    row.name = own.name;
    row.parameter_ids = tree.parameter_ids()[node];
    for (const auto id : row.parameter_ids) row.parameter_bytes += bytes_of(tree.parameters()[id].tensor);
    const Called* placed = called(own.module.get());
    if (placed != nullptr && placed->partition) row.placed_at = base::Partition(*placed->partition);
    if (costs) {
      const Cost& cost = (*costs)[node];
      row.forward_us = cost.forward_us;
      row.backward_us = 2 * cost.forward_us;
      row.activation_bytes = cost.activation_bytes;
      row.output_bytes = cost.output_bytes;
      for (const int other : cost.reads) row.together.push_back(place[other]);
    }
    rows.push_back(std::move(row));
  }
  return {std::move(rows), std::move(order)};
}

}  // namespace lamina::face
