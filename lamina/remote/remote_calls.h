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
#include "lamina/remote/issued.h"
#include "lamina/remote/remote_value.h"
#include "lamina/remote/steps.h"
#include "lamina/runtime/execution_context.h"
#include "lamina/runtime/worker_pool.h"
#include "lamina/transport/transport.h"
#include "lamina/value/failure.h"

namespace lamina::remote {

// The caller's side: calls of modules that live on other ranks, and what came of them.
class RemoteCalls : private Fetcher {
 public:
  // Where `predicts` is false every call waits for its results, so that a microbatch computes on one rank at a time.
  RemoteCalls(transport::Transport& transport, messaging::Handlers& handlers, Steps& steps,
              base::Clock::duration timeout, runtime::WorkerPool::Hooks hooks, bool predicts = true);

  // From the next step on; between steps.
  void stop_predicting() { predicts_ = false; }

  // Calls module `id` of `owner` from the current context; gradients flow back through the result. Returns at once,
  // with references, when a call like it was made before (see [Note: prediction]). Throws value::RemoteFailure when the
  // other rank raised, base::CancelledError when the step ended, base::TimeoutError, and base::UsageError for
  // what cannot cross ranks.
  value::Value call(base::Rank owner, base::ModuleId id, model::Modules& modules, value::Value arguments);

  // The end of a context: see Issued::settle(). unsettled(): whether it would wait for a call, or throw.
  void settle(runtime::ExecutionContext& context, const Issued::Held& held);
  bool unsettled(runtime::ExecutionContext& context);

  std::int64_t backwards() const { return backwards_; }  // that were asked for, ever

  // Notes of owners for the face here, left in their answers, oldest first; each once. Costs a look where there is
  // none. The references of an answer that was waited for are among them.
  std::vector<std::string> take_notes();

  // A clause: what this rank waits for from `rank`, else what that has answered last; "" when nothing was asked of it.
  std::string asked_of(base::Rank rank);

 private:
  using Pending = OutstandingCalls::Pending;

  void receive(StepScope& step, Answer&& answer);  // from the transport's thread
  // As RemoteValue's fetcher.
  base::Rank rank() const override { return transport_.rank(); }
  base::CallId new_delivery(const IssuedCall& call) override;
  void ask(const IssuedCall& call, const Delivery& delivery) override;
  at::Tensor receive(const base::CallId& name, const IssuedCall& call) override;
  bool ends_turns() const override;
  void give_way(const IssuedCall& awaited, const Wait& wait) override;
  const base::Patience& patience() const override { return patience_; }

  Pending begin(IssuedCall call);
  // Sends a ForwardRequest or a BackwardRequest.
  template <class AnyRequest>
  void send(const Pending& pending, AnyRequest&& request);
  value::Value wait_answer(PendingCall& pending);
  value::Value expected_outputs(const PendingCall& pending, const OutputSpec& output_spec, Request& request);
  at::Tensor reference(const PendingCall& pending, std::int64_t output, const value::TensorSpec& spec,
                       value::Strides strides, std::shared_ptr<const Lease> lease, std::vector<Delivery> prepared);
  // The tree with references in the place of what lies, or is made, elsewhere.
  value::Value departing(value::Value tree, PendingCall& to);
  value::Value departing_gradient(const at::Tensor& gradient, PendingCall& to);
  Tensors backward(const IssuedCall& forward, const Tensors& gradients, const BackwardOptions& options,
                   const GradientTargets& targets);

  // The step of a call of it; throws base::UsageError where that is over.
  std::shared_ptr<StepScope> step_of(const IssuedCall& call);

  transport::Transport& transport_;
  Steps& steps_;
  const base::Patience patience_;
  const runtime::WorkerPool::Hooks hooks_;
  bool predicts_;
  const std::shared_ptr<Releases> releases_ = std::make_shared<Releases>();
  CallProfiles profiles_;
  std::mutex mutex_;
  std::map<base::Rank, std::shared_ptr<const IssuedCall>> latest_;  // by owner
  std::vector<std::string> notes_;
  std::atomic<bool> noted_ = false;  // that there are some
  // Expires with this: a graph or a reference that the user keeps may outlive the job.
  const std::shared_ptr<const bool> alive_ = std::make_shared<bool>(true);
  std::atomic<std::int64_t> backwards_ = 0;
};

}  // namespace lamina::remote
