// SPDX-License-Identifier: Apache-2.0
// States: open, ended. Threads: those of its origin that are in it; on other ranks those that serve its calls, and the
// transport's, which ends it. Locks: mutex_, under which a message is sent and nothing else is taken.
#include "lamina/parameter_server/context.h"

#include <ATen/ops/add.h>
#include <c10/core/GradMode.h>

#include "lamina/base/error.h"
#include "lamina/base/str.h"

namespace lamina::parameter_server {
namespace {

thread_local const Backward* current_backward = nullptr;

}  // namespace

using base::Code;
using base::UsageError;

std::shared_ptr<AutogradContext>& current_context() {
  thread_local std::shared_ptr<AutogradContext> context;
  return context;
}

Backward::Backward(const AutogradContext& context, const base::Patience& patience)
    : context(context), patience(patience), outer_(std::exchange(current_backward, this)) {}

Backward::~Backward() { current_backward = outer_; }

const Backward* Backward::current() { return current_backward; }

void AutogradContext::check_open() {
  if (!ended_) return;
  if (origin_lost_) throw base::CancelledError(base::str(id, " is gone: rank ", id.origin, " is lost"));
  throw UsageError(base::str(id,
                             " has ended: each iteration needs a context of its own, which is used inside its "
                             "`with` alone"),
                   Code{"remote-context-ended"});
}

UsageError AutogradContext::stepped_twice() const {
  return UsageError(base::str(id,
                              " was used for an update already: the gradients of a context are applied once; begin "
                              "a new context for each iteration, with one backward before its updates"),
                    Code{"remote-context-stepped"});
}

void AutogradContext::keep_graph(const CallKey& call, std::shared_ptr<remote::CalleeGraph> graph) {
  const std::lock_guard guard(mutex_);
  check_open();
  graphs_[call] = std::move(graph);
}

std::shared_ptr<remote::CalleeGraph> AutogradContext::graph(const CallKey& call, bool keep) {
  const std::lock_guard guard(mutex_);
  check_open();
  const auto found = graphs_.find(call);
  if (found == graphs_.end()) {
    throw UsageError(base::str("a second backward through a call of a module on another rank, in ", id,
                               ": its graph is gone; give the first one retain_graph=True"),
                     Code{"remote-graph-gone"});
  }
  auto graph = found->second;
  if (!keep) graphs_.erase(found);
  return graph;
}

void AutogradContext::add(const remote::LeafGradients& found) {
  const at::NoGradGuard no_grad;
  const std::lock_guard guard(mutex_);
  check_open();
  for (std::size_t i = 0; i < found.leaves.size(); ++i) {
    if (!found.gradients[i].defined()) continue;
    auto& known = leaves_[found.leaves[i].unsafeGetTensorImpl()];
    if (known.taken) throw stepped_twice();
    known.leaf = found.leaves[i];
    // Out of place: a gradient of the engine's may be the gradient of something else, too.
    known.gradient = known.gradient.defined() ? at::add(known.gradient, found.gradients[i]) : found.gradients[i];
  }
}

std::vector<at::Tensor> AutogradContext::gradients(std::span<const at::Tensor> leaves) {
  const std::lock_guard guard(mutex_);
  check_open();
  std::vector<at::Tensor> gradients;
  for (const auto& leaf : leaves) {
    const auto found = leaves_.find(leaf.unsafeGetTensorImpl());
    gradients.push_back(found == leaves_.end() ? at::Tensor() : found->second.gradient);
  }
  return gradients;
}

std::vector<at::Tensor> AutogradContext::take(std::span<const at::Tensor> leaves) {
  const std::lock_guard guard(mutex_);
  check_open();
  std::vector<Leaf*> found;
  for (const auto& leaf : leaves) {
    auto& known = leaves_[leaf.unsafeGetTensorImpl()];
    if (known.taken) throw stepped_twice();
    known.leaf = leaf;
    found.push_back(&known);
  }
  std::vector<at::Tensor> gradients;
  for (Leaf* leaf : found) {
    leaf->taken = true;
    gradients.push_back(std::exchange(leaf->gradient, {}));
  }
  return gradients;
}

remote::LeafGradients AutogradContext::all_gradients() {
  const std::lock_guard guard(mutex_);
  check_open();
  remote::LeafGradients all;
  for (const auto& [key, leaf] : leaves_) {
    if (!leaf.gradient.defined()) continue;
    all.leaves.push_back(leaf.leaf);
    all.gradients.push_back(leaf.gradient);
  }
  return all;
}

void AutogradContext::reach(base::Rank rank, const std::function<void()>& send) {
  const std::lock_guard guard(mutex_);
  check_open();
  reached_.insert(rank);
  send();
}

void AutogradContext::begin_backward() {
  const std::lock_guard guard(mutex_);
  check_open();
  if (!optimizers_.empty()) throw stepped_twice();
  backward_ = true;
}

void AutogradContext::begin_step(const Address& optimizer) {
  const std::lock_guard guard(mutex_);
  check_open();
  if (!backward_) {
    throw UsageError(base::str("an update in ", id, " before its backward: there are no gradients"),
                     Code{"remote-no-backward"});
  }
  if (!optimizers_.insert(optimizer).second) throw stepped_twice();
}

std::set<base::Rank> AutogradContext::end(bool origin_lost) {
  // Destroyed without the lock: they hold objects of Python, too.
  std::map<CallKey, std::shared_ptr<remote::CalleeGraph>> graphs;
  std::unordered_map<const void*, Leaf> leaves;
  const std::lock_guard guard(mutex_);
  if (ended_) return {};
  ended_ = true;
  origin_lost_ = origin_lost;
  graphs.swap(graphs_);
  leaves.swap(leaves_);
  return std::exchange(reached_, {});
}

void AutogradContext::check() {
  const std::lock_guard guard(mutex_);
  check_open();
}

bool AutogradContext::ended() {
  const std::lock_guard guard(mutex_);
  return ended_;
}

}  // namespace lamina::parameter_server
