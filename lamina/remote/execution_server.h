// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "lamina/messaging/handlers.h"
#include "lamina/model/modules.h"
#include "lamina/remote/bursts.h"
#include "lamina/remote/graph.h"
#include "lamina/remote/inbox.h"
#include "lamina/remote/remote_calls.h"
#include "lamina/runtime/activity.h"
#include "lamina/transport/transport.h"
#include "lamina/value/failure.h"

namespace lamina::remote {

// The owner's side, which handles requests: runs what other ranks ask for, sends the results where they are wanted, and
// keeps them, and the graph of each call, until they are released or the step ends.
class ExecutionServer {
 public:
  // Runs what `ready` returns on a thread of `step`, now or when this rank enters it; `ready` is called before, in the
  // order of the requests.
  using Work = std::function<void()>;
  using Start = std::function<void(base::Step step, std::function<Work()> ready)>;

  ExecutionServer(transport::Transport& transport, messaging::Handlers& handlers, runtime::ComputeSlot& slot,
                  Inbox& inbox, RemoteCalls& calls, value::Failures& failures, Start start);

  void set_modules(std::shared_ptr<model::Modules> modules);

  // The latest request of `rank`, as in "forward of h.5 on rank 1 (step 3, microbatch 2)"; "" for none. From the
  // transport's thread.
  std::string latest_of(base::Rank rank);

  void end_step(base::Step step);  // forgets every call of it

 private:
  // What a call returned, which is to be sent as it was then.
  struct Results {
    Results() = default;
    Results(std::string module, Tensors tensors, bool gradients);
    bool written(std::int64_t output) const;  // since then
    at::Tensor delivered(std::int64_t output) const;
    std::string module;
    Tensors tensors;
    bool gradients = false;
    std::vector<std::uint32_t> versions;
  };

  // A call that runs, has run, or waits for its inputs. Guarded by mutex_.
  struct Served {
    bool finished = false;
    std::vector<Delivery> owed;  // asked for before it has finished
    Results results;
    std::optional<value::Failure> failure;
    std::shared_ptr<CalleeGraph> graph;
    bool outputs_released = false;
    bool graph_released = false;                 // but by the backwards that are asked for
    int backwards = 0;                           // asked for, and not begun
    std::vector<std::function<void()>> readers;  // to be told that it has finished
  };
  struct Parked;

  // From the transport's thread. A request takes neither a thread nor the compute slot before its inputs have arrived.
  void receive(std::shared_ptr<Parked> parked);
  void deliver(const Ask& ask);
  void await_inputs(const std::shared_ptr<Parked>& parked);
  void await_forward(const std::shared_ptr<Parked>& parked, const std::function<void()>& finished);
  void await_earlier(Parked& parked, const std::function<void()>& finished);
  // What the earlier call, whose place in the order this one takes, called last of each module: so their children keep
  // the order too.
  void inherit_order(const Request& request, runtime::Activity& activity);
  void await_finish(Served& served, Parked& parked, const std::function<void()>& finished);  // under the lock
  void serve(Parked& parked, runtime::ComputeSlot::Place& place);
  // See [Note: flags of parameters]: a module has those that its request brings, and leaves them so.
  void set_flags(const Parked& parked, runtime::Activity& activity);
  void require_flags(const Request& request, const runtime::ParameterFlags::Flags& given, runtime::Activity& activity);
  Tensors forward(ForwardRequest& request, Answer& answer);
  Tensors backward(Parked& parked, Answer& answer);
  std::shared_ptr<CalleeGraph> graph_of(Served& forward, bool keep);
  // The call's end: what is owed goes out, then the answer; a failure takes the place of both.
  void finish(const Parked& parked, Tensors outputs, std::optional<value::Failure> failure, Answer&& answer,
              runtime::Activity& activity);
  void fulfil(const std::vector<Delivery>& owed, const Results& results, const std::optional<value::Failure>& failure);
  void forget(const Release& release);

  transport::Transport& transport_;
  runtime::ComputeSlot& slot_;
  Inbox& inbox_;
  RemoteCalls& calls_;
  value::Failures& failures_;
  const Start start_;
  Bursts bursts_;
  std::shared_ptr<model::Modules> modules_;
  std::mutex mutex_;
  std::map<base::CallId, std::shared_ptr<Served>> served_;
  std::map<base::Rank, IssuedCall> latest_;   // the request of each rank, without the module's name
  std::map<base::CallId, CallOrder> orders_;  // of calls that have finished, for the next one
  // What was released, for the next thread that serves to destroy: objects of Python may hang on it, and the
  // transport's thread must not wait for Python's lock.
  std::vector<std::shared_ptr<void>> garbage_;
};

}  // namespace lamina::remote
