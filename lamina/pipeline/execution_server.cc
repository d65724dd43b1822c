// SPDX-License-Identifier: Apache-2.0
#include "lamina/pipeline/execution_server.h"

#include "lamina/pipeline/ambient.h"
#include "lamina/pipeline/requests.h"
#include "lamina/pipeline/streams.h"

namespace lamina::pipeline {

using transport::Kind;

void ExecutionServer::serve(transport::Message&& request) {
  const bool forwards = request.kind == Kind::kForward;
  Activity activity(slot_, request.call.step, request.call.microbatch,
                    forwards ? plan::Phase::kForward : plan::Phase::kBackward);
  transport::Message answer;
  answer.call = request.call;
  answer.caller = request.caller;
  answer.reply_to = request.reply_to;
  try {
    answer.kind = Kind::kResult;
    answer.body = forwards ? forward(request) : backward(request);
    transport_.send(request.reply_to, answer);
  } catch (const base::CancelledError&) {
    throw;
  } catch (const base::PeerError&) {
    throw;
  } catch (...) {
    // Described in any case: until then a face may keep the error in this thread, where the next request would meet it.
    answer.kind = Kind::kError;
    answer.body = value::to_value(failures_.describe_to_send(std::current_exception(), transport_.rank()));
    if (slot_.cancelled()) throw;  // a consequence of the error that ended the step, which is announced by itself
    transport_.send(request.reply_to, answer);
  }
}

value::Value ExecutionServer::forward(transport::Message& request) {
  if (!modules_) throw base::UsageError("this rank was asked to run a module before it has a model");
  const auto state = split_state(request.state);
  auto graph = std::make_shared<CalleeGraph>(request.body);
  value::Value outputs;
  std::optional<Stream> stream;
  if (state.seed) stream.emplace(*state.seed);
  run_with_modes(state.modes,
                 [&] { outputs = modules_->call(request.target, state.of_face, std::move(request.body)); });
  graph->set_outputs(outputs);
  if (graph->differentiable()) {
    std::lock_guard guard(mutex_);
    graphs_[request.call] = std::move(graph);
  }
  return outputs;
}

value::Value ExecutionServer::backward(const transport::Message& request) {
  const auto what = to_backward_request(request.body);
  base::CallId forward = request.call;
  forward.counter = what.forward;
  std::shared_ptr<CalleeGraph> graph;
  {
    std::lock_guard guard(mutex_);
    const auto found = graphs_.find(forward);
    if (found == graphs_.end()) {
      throw base::UsageError(
          "backward through a call a second time: its graph is gone; keep it with retain_graph=True");
    }
    graph = found->second;
    if (!what.keep_graph) graphs_.erase(found);
  }
  return to_value(graph->backward(what.gradients, what.keep_graph));
}

void ExecutionServer::end_step() {
  decltype(graphs_) ended;
  std::lock_guard guard(mutex_);
  ended.swap(graphs_);
}

}  // namespace lamina::pipeline
