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
#include "lamina/remote/remote_calls.h"
#include "lamina/remote/steps.h"
#include "lamina/runtime/execution_context.h"
#include "lamina/transport/transport.h"
#include "lamina/value/failure.h"

namespace lamina::remote {

// The owner's side, which handles requests: runs what other ranks ask for, and sends the results where they are wanted.
// The calls that it has served are the step's: see ServedCalls.
class ExecutionServer {
 public:
  ExecutionServer(transport::Transport& transport, messaging::Handlers& handlers, Steps& steps, RemoteCalls& calls,
                  value::Failures& failures);

  void set_modules(std::shared_ptr<model::Modules> modules);

  // The latest request of `rank`, as in "forward of h.5 on rank 1 (step 3, microbatch 2)"; "" for none. From the
  // transport's thread.
  std::string latest_of(base::Rank rank);

 private:
  struct Parked;

  // From the transport's thread. A request takes neither a thread nor the compute slot before its inputs have arrived.
  void receive(StepScope& step, std::shared_ptr<Parked> parked);
  void deliver(StepScope& step, const Ask& ask);
  void await_inputs(StepScope& step, const std::shared_ptr<Parked>& parked);
  void serve(StepScope& step, Parked& parked, runtime::ComputeSlot::Place& place);
  // See [Note: flags of parameters]: a module has those that its request brings, and leaves them so.
  void require_flags(const Request& request, const runtime::ParameterFlags::Flags& given,
                     runtime::ExecutionContext& context);
  Tensors forward(StepScope& step, ForwardRequest& request, Answer& answer);
  Tensors backward(StepScope& step, Parked& parked, Answer& answer);
  // Runs code of the model for the call; the failure that it ends with.
  template <class Run>
  std::optional<value::Failure> failure_of(StepScope& step, const Parked& parked, const Run& run);
  // The call's end: what is owed goes out, then the answer; a failure takes the place of both. The weight part of a
  // backward comes after them.
  void finish(StepScope& step, Parked& parked, Tensors outputs, std::optional<value::Failure> failure, Answer&& answer,
              runtime::ExecutionContext& context);
  void fulfil(StepScope& step, const std::vector<Delivery>& owed, const Results& results,
              const std::optional<value::Failure>& failure);

  transport::Transport& transport_;
  RemoteCalls& calls_;
  value::Failures& failures_;
  std::shared_ptr<model::Modules> modules_;
  std::mutex mutex_;
  std::map<base::Rank, IssuedCall> latest_;  // the request of each rank, without the module's name
};

}  // namespace lamina::remote
