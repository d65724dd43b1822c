// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "lamina/base/wait.h"
#include "lamina/messaging/handlers.h"
#include "lamina/model/modules.h"
#include "lamina/remote/graph.h"
#include "lamina/remote/inbox.h"
#include "lamina/remote/remote_value.h"
#include "lamina/remote/views.h"
#include "lamina/runtime/activity.h"
#include "lamina/runtime/worker_pool.h"
#include "lamina/transport/transport.h"
#include "lamina/value/failure.h"

namespace lamina::remote {

// A call whose end this rank waits for. Guarded by the mutex of RemoteCalls.
struct PendingCall {
  std::shared_ptr<IssuedCall> call;
  std::vector<std::int64_t> given;  // the numbers of the calls of the same activity whose results it was given
  std::condition_variable changed;
  std::function<void()> ready;  // of the thread that waits for the answer
  std::optional<value::Value> answer;
  std::optional<value::Failure> failure;
  bool done = false;
};

// A failure that an activity's code was told of, by call `counter`.
struct ToldFailure {
  std::int64_t counter;
  value::Failure failure;
};

// [Note: order of calls] A module may keep state, and gradients are added in an order: of the calls of one activity to
// one module each runs after the one before it, though their arguments arrive in any order. So do their backwards, and
// what these calls call in turn. Here, by module and whether it is a backward: the number of the latest call.
using CallOrder = std::map<std::pair<base::ModuleId, bool>, std::int64_t>;

// A call that returned views of its arguments, and what counts the writes to them since.
struct ReturnedViews {
  std::shared_ptr<IssuedCall> call;
  std::optional<Outline> outline;  // to be learned when that is known
  SharedViews shared;
};

// What one activity has called; touched by its thread alone.
struct Issued {
  std::vector<std::shared_ptr<PendingCall>> calls;
  std::vector<std::weak_ptr<RemoteValue>> references;
  std::vector<ToldFailure> told;
  std::map<const Learned*, int> counts;
  CallOrder latest;
  std::vector<ReturnedViews> views;
};
inline Issued& issued(runtime::Activity& activity) { return activity.attached<Issued>(); }

// The caller's side: calls of modules that live on other ranks, and what came of them.
class RemoteCalls : private Fetcher {
 public:
  // Where `predicts` is false every call waits for its results, so that a microbatch computes on one rank at a time.
  RemoteCalls(transport::Transport& transport, messaging::Handlers& handlers, Inbox& inbox,
              base::Deadline::Clock::duration timeout, runtime::WorkerPool::Hooks hooks, bool predicts = true);

  // Calls module `id` of `owner` from the current activity; gradients flow back through the result. Returns at once,
  // with references, when a call like it was made before (see [Note: prediction]). Throws value::RemoteFailure when the
  // other rank raised, base::CancelledError when the step ended, base::TimeoutError, and base::UsageError for
  // what cannot cross ranks.
  value::Value call(base::Rank owner, base::ModuleId id, model::Modules& modules, value::Value arguments);

  // The end of an activity, in two parts. held(): the references that somebody keeps, other than in `results`, which
  // nobody else holds a copy of; they are to have their values before the step ends. settle() fetches those, and waits
  // until nothing runs any more that the activity's calls have set off; it throws the first failure of a call that the
  // activity's code was not told of, be it by a call that has failed for the same cause. unsettled(): whether it
  // would wait for a call, or throw.
  using Held = std::vector<std::shared_ptr<RemoteValue>>;
  Held held(runtime::Activity& activity, const Tensors& results);
  void settle(runtime::Activity& activity, const Held& held);
  bool unsettled(runtime::Activity& activity);

  // When the code of an activity is over: whether it has written to views that its calls returned. Throws
  // base::UsageError where those shared no memory with the arguments; see [Note: views].
  void learn_views(runtime::Activity& activity);

  void begin_step(base::Step step);
  void end_step();
  void cancel();  // from any thread: every wait ends with base::CancelledError

  // The leaves whose gradients code of this rank has asked for in `microbatch`, by autograd.grad.
  Tensors asked(base::Microbatch microbatch);

  std::int64_t backwards() const { return backwards_; }  // that were asked for, ever

  // Notes of owners for the face here, left in their answers, oldest first; each once. Costs a look where there is
  // none. Those of an answer that was waited for are among them.
  std::vector<std::string> take_notes();

  // A clause: what this rank waits for from `rank`, else what that has answered last; "" when nothing was asked of it.
  std::string asked_of(base::Rank rank);

  // Ranks whose answers this one waits for.
  std::vector<base::Rank> awaited();

 private:
  using Pending = std::shared_ptr<PendingCall>;

  void deliver(Answer&& answer);  // from the transport's thread
  // As RemoteValue's fetcher.
  base::Rank rank() const override { return transport_.rank(); }
  base::CallId new_name(base::Step step, base::Microbatch microbatch) override;
  void ask(const IssuedCall& call, const Delivery& delivery) override;
  at::Tensor receive(const base::CallId& name, const IssuedCall& call) override;
  void give_way(const IssuedCall& awaited, const Wait& wait) override;
  const base::Patience& patience() const override { return patience_; }

  Pending begin(IssuedCall call);
  // Of a ForwardRequest or a BackwardRequest.
  template <class AnyRequest>
  void send(const Pending& pending, AnyRequest&& request);
  value::Value wait_answer(PendingCall& pending);
  void wait_done(PendingCall& pending, const Issued& issued);
  value::Value expected_outputs(const PendingCall& pending, const Outline& outline, Request& request);
  at::Tensor reference(const PendingCall& pending, std::int64_t output, const value::TensorSpec& spec,
                       value::Strides strides, std::shared_ptr<const Lease> lease, std::vector<Delivery> prepared);
  // The tree with references in the place of what lies, or is made, elsewhere.
  value::Value departing(value::Value tree, PendingCall& to);
  value::Value departing_gradient(const at::Tensor& gradient, PendingCall& to);
  Tensors backward(const IssuedCall& forward, const Tensors& gradients, const BackwardOptions& options,
                   const GradientTargets& targets);

  transport::Transport& transport_;
  Inbox& inbox_;
  const base::Patience patience_;
  const runtime::WorkerPool::Hooks hooks_;
  const bool predicts_;
  const std::shared_ptr<Releases> releases_ = std::make_shared<Releases>();
  Experience experience_;
  std::mutex mutex_;
  std::map<base::CallId, Pending> pending_;                         // until they are done
  std::map<base::Rank, std::shared_ptr<const IssuedCall>> latest_;  // by owner
  std::map<base::Microbatch, std::int64_t> counters_;
  std::vector<std::string> notes_;
  std::atomic<bool> noted_ = false;  // that there are some
  std::map<base::Microbatch, Tensors> asked_;
  base::Step step_{-1};
  bool open_ = false;
  bool cancelled_ = false;
  // Expires with this: a graph or a reference that the user keeps may outlive the job.
  const std::shared_ptr<const bool> alive_ = std::make_shared<bool>(true);
  std::atomic<std::int64_t> backwards_ = 0;
  std::atomic<bool> told_ = false;  // that a wait of this step is long: once, since all its microbatches wait alike
};

}  // namespace lamina::remote
