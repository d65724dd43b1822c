// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "lamina/base/wait.h"
#include "lamina/messaging/messenger.h"
#include "lamina/optim/functional.h"
#include "lamina/parameter_server/context.h"
#include "lamina/parameter_server/owned.h"
#include "lamina/parameter_server/protocol.h"
#include "lamina/parameter_server/requests.h"
#include "lamina/parameter_server/trainer.h"
#include "lamina/parameter_server/turns.h"
#include "lamina/runtime/worker_pool.h"
#include "lamina/value/failure.h"

namespace lamina::parameter_server {

struct Options {
  base::Clock::duration timeout = std::chrono::seconds(1800);  // of waits of threads that serve
  runtime::WorkerPool::Hooks thread_hooks;
  std::shared_ptr<value::Failures> failures;  // nullptr: those of C++
};

// One rank's end of modules and parameters that ranks own and others use. It serves from the job's beginning to its
// end, whatever the rank's own program does meanwhile. Several may live in one process. From any thread.
class Service {
 public:
  // Before the messenger starts.
  Service(Options options, messaging::Messenger& messenger);
  // After the messenger was closed.
  ~Service();

  base::Rank rank() const { return messenger_.rank(); }
  std::int64_t job() const { return job_; }

  // This rank's own, and what it does with others'.
  Owned& owned() { return owned_; }
  Trainer& trainer() { return trainer_; }

  // Places it, and answers those who look for its name already. Throws as Owned::place() does.
  RemoteModule place(Placed placed);
  // Serves until every other rank has left or is lost, or no request has come for as long as the patience has:
  // base::TimeoutError.
  void serve(const base::Patience& patience);

  // Makes this thread enter a new context. Throws base::UsageError where it is in one.
  std::shared_ptr<AutogradContext> begin_context();
  // Ends it, on all ranks. Idempotent; from the thread that began it.
  void end_context(const std::shared_ptr<AutogradContext>& context);

  // How many have a part here.
  std::size_t contexts();

  // Ends the threads; no message comes any more. False where one is still in the user's code after 30 s: then the
  // service must never be destroyed.
  bool end();

 private:
  void receive(transport::Message&& message);  // kRequest
  void end_served(const ContextId& id, bool origin_lost);
  void lose(const base::Loss& loss);
  std::shared_ptr<AutogradContext> context_of(const ContextId& id);  // under the lock

  // In a worker.
  void serve(Request&& request, const std::shared_ptr<AutogradContext>& context);
  value::Value run(Request& request, const std::shared_ptr<AutogradContext>& context);
  value::Value run_call(Request& request, const std::shared_ptr<AutogradContext>& context);
  value::Value run_backward(Request& request, AutogradContext& context);
  value::Value run_optimizer(Request& request);
  value::Value run_norm(const Request& request, AutogradContext& context);
  value::Value run_step(const Request& request, AutogradContext& context);
  value::Value run_share(const Request& request);
  void answer(base::Rank asker, Answer answer);
  void start(std::function<void()> task);  // in a worker

  base::Patience patience() const;
  void tell_end(const ContextId& id, const std::set<base::Rank>& ranks);

  const Options options_;
  const std::shared_ptr<value::Failures> failures_;
  messaging::Messenger& messenger_;
  const std::int64_t job_;
  const std::shared_ptr<optim::Threads> threads_;
  Requests requests_;
  Turns turns_;
  Owned owned_;
  Trainer trainer_;

  std::mutex mutex_;  // of all below; owned_'s may be taken under it
  std::condition_variable changed_;
  std::map<std::string, std::vector<Request>> waiting_;             // finds of what is not placed yet
  std::map<ContextId, std::shared_ptr<AutogradContext>> contexts_;  // those begun here, too
  std::int64_t begun_ = 0;
  std::set<base::Rank> lost_;
  base::Clock::time_point last_request_ = base::Clock::now();
  int running_ = 0;
  bool ended_ = false;
  std::unique_ptr<runtime::WorkerPool> pool_;
};

}  // namespace lamina::parameter_server
