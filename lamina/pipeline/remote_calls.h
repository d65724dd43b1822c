// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "lamina/base/wait.h"
#include "lamina/module/modules.h"
#include "lamina/pipeline/activity.h"
#include "lamina/pipeline/graph.h"
#include "lamina/pipeline/inbox.h"
#include "lamina/pipeline/remote_value.h"
#include "lamina/pipeline/worker_pool.h"
#include "lamina/transport/transport.h"

namespace lamina::pipeline {

// The caller's side: calls of modules that live on other ranks, and what came of them.
class RemoteCalls {
 public:
  RemoteCalls(transport::Transport& transport, Inbox& inbox, base::Deadline::Clock::duration timeout,
              WorkerPool::Hooks hooks);

  // Calls module `id` of `owner` from the current activity; gradients flow back through the result. Returns at once,
  // with references, when a call like it was made before (see [Note: prediction]). Throws value::RemoteFailure when the
  // other rank raised, base::CancelledError when the step ended, base::TimeoutError, and base::UsageError for
  // what cannot cross ranks.
  value::Value call(base::Rank owner, base::ModuleId id, module::Modules& modules, value::Value arguments);

  // At the end of an activity: waits until nothing runs any more that its calls have set off, and until the references
  // that somebody still holds, other than in `results`, have their values. Throws the first failure of a call that the
  // activity has not seen.
  void settle(Activity& activity, const value::Value& results);
  // Whether settle() would wait.
  bool unsettled(Activity& activity);

  void begin_step(base::Step step);
  void end_step();
  void cancel();                              // from any thread: every wait ends with base::CancelledError
  void deliver(transport::Message&& answer);  // kResult and kError, from the transport's thread

  // What this rank waits for from `rank`; "" for nothing.
  std::string awaited_from(base::Rank rank);

  // For RemoteValue.
  base::Rank rank() const { return transport_.rank(); }
  base::CallId new_name(base::Step step, base::Microbatch microbatch);
  void ask(const IssuedCall& call, transport::Delivery delivery);
  at::Tensor receive(const base::CallId& name, const IssuedCall& call);
  // Waits with the compute slot, and what the face must not hold, given up.
  template <class Ready, class What>
  void wait(std::unique_lock<std::mutex>& lock, std::condition_variable& changed, const Ready& ready, const What& what);

 private:
  struct Pending {
    std::shared_ptr<const IssuedCall> call;
    std::condition_variable changed;
    std::optional<value::Value> answer;
    std::optional<value::Failure> failure;
    bool done = false;
    bool seen = false;  // the activity knows of the failure
  };
  using Activities = std::map<const Activity*, std::vector<std::shared_ptr<Pending>>>;

  std::shared_ptr<Pending> begin(base::Rank owner, const std::string& name, bool backward);
  void send(const Pending& pending, transport::Message&& request);
  value::Value wait_answer(Pending& pending);
  std::vector<at::Tensor> references(const Pending& pending, const Outline& outline,
                                     std::vector<transport::Delivery>& deliveries);
  value::Value departing(value::Value tree, base::Rank owner);
  Tensors backward(const IssuedCall& forward, Lease& graph, const Tensors& gradients, bool keep_graph,
                   const GradientTargets& targets);

  transport::Transport& transport_;
  Inbox& inbox_;
  const base::Patience patience_;
  const WorkerPool::Hooks hooks_;
  const std::shared_ptr<Releases> releases_ = std::make_shared<Releases>();
  Experience experience_;
  std::mutex mutex_;
  std::map<base::CallId, std::shared_ptr<Pending>> pending_;  // until they are done
  Activities issued_;
  std::map<base::Microbatch, std::int64_t> counters_;
  base::Step step_{-1};
  bool open_ = false;
  bool cancelled_ = false;
  // Expires with this: a graph or a reference that the user keeps may outlive the job.
  const std::shared_ptr<const bool> alive_ = std::make_shared<bool>(true);
  std::atomic<bool> told_ = false;  // that a wait of this step is long: once, since all its microbatches wait alike
};

}  // namespace lamina::pipeline
