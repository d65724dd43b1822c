// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

#include "lamina/base/wait.h"
#include "lamina/parameter_server/protocol.h"
#include "lamina/remote/graph.h"

namespace lamina::parameter_server {

using remote::Tensors;

// This rank's part of a context: see [Note: contexts]. May be used from several threads. Everything but `id` and
// `ended()` throws base::UsageError after its end.
class AutogradContext {
 public:
  AutogradContext(ContextId id, std::int64_t job) : id(id), job(job) {}

  const ContextId id;
  const std::int64_t job;  // of the rank that keeps this part

  // The graph of a call served here, for its backward. The call is its caller's rank and number.
  using CallKey = std::pair<base::Rank, std::int64_t>;
  void keep_graph(const CallKey& call, std::shared_ptr<remote::CalleeGraph> graph);
  // Throws base::UsageError where a backward has gone through it already; `keep` says that another one may.
  std::shared_ptr<remote::CalleeGraph> graph(const CallKey& call, bool keep);

  // Adds to the gradients of leaves that lie here. Throws base::UsageError where one of them was updated already.
  void add(const remote::LeafGradients& found);
  // The gradients of `leaves`, undefined where there is none.
  std::vector<at::Tensor> gradients(std::span<const at::Tensor> leaves);
  // Takes those of `leaves` away, for an update. Throws base::UsageError, and takes none, where one was taken before.
  std::vector<at::Tensor> take(std::span<const at::Tensor> leaves);
  // The gradients that are here, with their leaves.
  remote::LeafGradients all_gradients();

  // Sends something in this context to a rank, which is to be told of its end.
  void reach(base::Rank rank, const std::function<void()>& send);

  // Begins the backward, and the updates, of its origin.
  void begin_backward();
  void begin_step(const Address& optimizer);  // by its first part

  // Forgets everything. Returns the ranks that are to be told; none the second time.
  std::set<base::Rank> end(bool origin_lost = false);
  bool ended();
  void check();  // that it has not

 private:
  void check_open();  // under the lock
  base::UsageError stepped_twice() const;

  std::mutex mutex_;
  bool ended_ = false, origin_lost_ = false;
  bool backward_ = false;         // there was one
  std::set<Address> optimizers_;  // that have stepped
  std::map<CallKey, std::shared_ptr<remote::CalleeGraph>> graphs_;
  struct Leaf {
    at::Tensor leaf, gradient;
    bool taken = false;
  };
  std::unordered_map<const void*, Leaf> leaves_;
  std::set<base::Rank> reached_;
};

// The context that this thread is in, as a trainer or as it serves a call; nullptr for none.
std::shared_ptr<AutogradContext>& current_context();

// This thread goes backward through a context, while it lives.
class Backward {
 public:
  // Both outlive it. `patience`: of the calls that it makes.
  Backward(const AutogradContext& context, const base::Patience& patience);
  ~Backward();
  Backward(const Backward&) = delete;

  // The innermost of this thread; nullptr for none.
  static const Backward* current();

  const AutogradContext& context;
  const base::Patience& patience;

 private:
  const Backward* const outer_;
};

}  // namespace lamina::parameter_server
