// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "lamina/base/wait.h"
#include "lamina/messaging/messenger.h"
#include "lamina/optim/functional.h"
#include "lamina/parameter_server/context.h"
#include "lamina/parameter_server/optimizer.h"
#include "lamina/parameter_server/parameter.h"
#include "lamina/parameter_server/protocol.h"
#include "lamina/parameter_server/requests.h"
#include "lamina/parameter_server/turns.h"
#include "lamina/runtime/worker_pool.h"
#include "lamina/value/failure.h"

namespace lamina::parameter_server {

struct Options {
  base::Deadline::Clock::duration timeout = std::chrono::seconds(1800);  // of waits of threads that serve
  runtime::WorkerPool::Hooks thread_hooks;
  std::shared_ptr<value::Failures> failures;  // nullptr: those of C++
};

// A module, or a parameter, as it is placed on its owner. `call` is run in threads of the owner's, one call at a time.
struct Placed {
  std::string name;  // by which others find it; "": they are told
  std::function<value::Value(value::Value arguments)> call;
  std::vector<std::pair<std::string, at::Tensor>> parameters;
};

// An optimizer of parameters on several ranks: its part on each owner.
struct RemoteOptimizer {
  std::vector<Address> parts;
  bool needs_norm = false;  // of the gradients of all parts
  value::Value hyper{};     // that its steps take in the place of those that it was made with; None: those
};

// [Note: release] What a rank has another one make, a module without a name or an optimizer, only that rank can name,
// until it shares it: says to the owner, before it tells a third one, that others will. What has not been shared goes
// when its maker has left, or is lost. What is found by a name, or was placed by its owner, stays until the job ends.
enum class Shared : std::uint8_t { kModule, kOptimizer };

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

  // On the owner. Throws base::UsageError for a name that is taken, and a parameter that is no leaf.
  RemoteModule place(Placed placed);
  // Makes an optimizer of parameters that lie here. Throws base::UsageError for one that does not.
  std::int64_t add_optimizer(const std::vector<std::int64_t>& parameters, std::shared_ptr<Updater> updater);
  std::shared_ptr<Parameter> parameter(std::int64_t number);
  // Serves until every other rank has left or is lost, or no request has come for as long as the patience has:
  // base::TimeoutError.
  void serve(const base::Patience& patience);

  // On a trainer. All throw base::UsageError for what belongs to another job, base::PeerError for an owner that is
  // lost, base::TimeoutError, and what the owner threw as value::RemoteFailure.

  // Waits until `owner` has placed a module of that name.
  RemoteModule find(base::Rank owner, const std::string& name, const base::Patience& patience);
  // In a context, and with grad mode on, the outputs have a history.
  value::Value call(const Address& module, const std::string& label, value::Value arguments,
                    const base::Patience& patience);
  // Hyper-parameters of a functional optimizer, by their names, with the presets of those that are not given.
  std::vector<double> hyper_values(const std::string& functional,
                                   std::span<const std::pair<std::string_view, fused::HyperValue>> given) const;
  // One of the engine's, by its name, of parameters which may lie on several ranks.
  RemoteOptimizer make_optimizer(const std::string& functional, const std::vector<double>& hyper,
                                 const std::vector<Address>& parameters, const base::Patience& patience);

  // See [Note: release]. Before an address is given to another rank.
  void share(Shared what, const Address& address, const base::Patience& patience);

  // Makes this thread enter a new context. Throws base::UsageError where it is in one.
  std::shared_ptr<Context> begin_context();
  // Ends it, on all ranks. Idempotent; from the thread that began it.
  void end_context(const std::shared_ptr<Context>& context);
  // The gradients of all leaves behind `tensors`, on whatever rank, become the context's.
  void backward(Context& context, const Tensors& tensors, const Tensors& gradients, bool keep_graph,
                const base::Patience& patience);
  // Updates the optimizer's parameters with the context's gradients, on all owners at the same time. An optimizer steps
  // once in a context. Where an owner fails, the others have made their updates.
  void step(Context& context, const RemoteOptimizer& optimizer, const base::Patience& patience);

  // How many contexts have a part here, modules and optimizers are here.
  std::size_t contexts();
  std::size_t modules();
  std::size_t optimizers();

  // Ends the threads; no message comes any more. False where one is still in the user's code after 30 s: then the
  // service must never be destroyed.
  bool end();

 private:
  void receive(transport::Message&& message);  // kRequest
  void end_served(const ContextId& id, bool origin_lost);
  void lose(const base::Loss& loss);
  std::shared_ptr<Context> context_of(const ContextId& id);  // under the lock

  // In a worker.
  void serve(Request&& request, const std::shared_ptr<Context>& context);
  value::Value run(Request& request, const std::shared_ptr<Context>& context);
  value::Value run_call(Request& request, const std::shared_ptr<Context>& context);
  value::Value run_backward(Request& request, Context& context);
  value::Value run_optimizer(Request& request);
  value::Value run_norm(const Request& request, Context& context);
  value::Value run_step(const Request& request, Context& context);
  value::Value run_share(const Request& request);
  void release(base::Rank maker);
  void answer(base::Rank asker, Answer answer);
  void start(std::function<void()> task);  // in a worker

  remote::Tensors call_backward(const std::shared_ptr<Context>& context, const Address& module, const std::string& what,
                                std::int64_t call, const remote::Tensors& gradients,
                                const remote::BackwardOptions& options);
  void check_context(const Context& context) const;
  base::Patience patience() const;
  std::shared_ptr<Optimizer> optimizer(std::int64_t number);
  std::shared_ptr<const optim::Functional> functional(const std::string& name) const;
  void tell_end(const ContextId& id, const std::set<base::Rank>& ranks);
  // Returns the answers of all the optimizer's parts to `verb`.
  std::vector<value::Value> ask_parts(Context& context, const RemoteOptimizer& optimizer, Verb verb,
                                      const value::Value& body, const base::Patience& patience);

  const Options options_;
  const std::shared_ptr<value::Failures> failures_;
  messaging::Messenger& messenger_;
  const std::int64_t job_;
  const std::shared_ptr<optim::Threads> threads_;
  Requests requests_;
  Turns turns_;
  Parameters parameters_of_;

  std::mutex mutex_;  // of all below
  std::condition_variable changed_;
  // The rank that alone can name it; none where others can.
  using Maker = std::optional<base::Rank>;
  struct PlacedHere {
    std::shared_ptr<const Placed> what;  // nullptr: released, as below
    Maker maker;
    std::vector<std::int64_t> parameters;
  };
  struct OptimizerHere {
    std::shared_ptr<Optimizer> what;
    Maker maker;
  };
  std::vector<PlacedHere> placed_;
  std::map<std::string, RemoteModule> names_;
  std::vector<std::shared_ptr<Parameter>> parameters_;
  std::map<const Parameter*, std::int64_t> parameter_numbers_;
  std::vector<OptimizerHere> optimizers_;
  std::map<std::string, std::vector<Request>> waiting_;     // finds of what is not placed yet
  std::map<ContextId, std::shared_ptr<Context>> contexts_;  // those begun here, too
  std::int64_t begun_ = 0;
  std::set<base::Rank> lost_;
  base::Deadline::Clock::time_point last_request_ = base::Deadline::Clock::now();
  int running_ = 0;
  bool ended_ = false;
  std::unique_ptr<runtime::WorkerPool> pool_;
};

}  // namespace lamina::parameter_server
