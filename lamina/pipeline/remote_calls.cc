// SPDX-License-Identifier: Apache-2.0
#include "lamina/pipeline/remote_calls.h"

#include "lamina/pipeline/ambient.h"
#include "lamina/pipeline/requests.h"
#include "lamina/pipeline/streams.h"

namespace lamina::pipeline {

value::Value PendingResult::wait(plan::Phase phase) {
  auto answer = Activity::current()->without_slot(phase, [this] {
    std::unique_lock lock(calls_.mutex_);
    const auto ready = [this] { return slot_->answer || calls_.cancelled_; };
    base::wait_until(lock, slot_->arrived, calls_.patience_, ready, [this] { return slot_->what; });
    calls_.pending_.erase(id_);
    if (!slot_->answer) throw base::CancelledError("the step was ended by an error elsewhere");
    return std::move(*slot_->answer);
  });
  if (answer.kind == transport::Kind::kError) throw value::RemoteFailure(value::to_failure(answer.body));
  return std::move(answer.body);
}

RemoteCalls::RemoteCalls(transport::Transport& transport, base::Deadline::Clock::duration timeout)
    : transport_(transport), patience_{timeout, nullptr, [this](const std::string& line) {
                                         if (!told_.exchange(true)) base::log_warning(line);
                                       }} {}

value::Value RemoteCalls::call(base::Rank owner, base::ModuleId id, module::Modules& modules, value::Value arguments) {
  const std::string name = modules.name(id);
  transport::Message request;
  request.kind = transport::Kind::kForward;
  request.target = id;
  check_modes_travel(name);
  CallState state{capture_modes(), std::nullopt, modules.capture_state(id)};
  if (modules.starts_stream(id)) state.seed = draw_seed();
  request.state = join_state(state);
  request.body = arguments;
  auto pending = start(owner, std::move(request), base::str("forward of ", name, " on rank ", owner));

  // Without grad mode too: the module may return what had a graph before, its argument or a parameter.
  const auto run_backward = [this, alive = std::weak_ptr(alive_), owner, forward = pending.id_, name](
                                const Tensors& gradients, bool keep) {
    if (alive.expired()) throw base::UsageError(base::str("backward through ", name, " after its job was shut down"));
    return backward(owner, forward, name, gradients, keep);
  };
  CallerGraph graph(arguments, name, run_backward);
  value::Value outputs = pending.wait(plan::Phase::kForward);
  graph.attach(outputs);
  return outputs;
}

Tensors RemoteCalls::backward(base::Rank owner, base::CallId forward, const std::string& name, const Tensors& gradients,
                              bool keep_graph) {
  const Activity* activity = Activity::current();
  if (activity == nullptr || activity->step() != forward.step) {
    throw base::UsageError(base::str("backward through ", name, ", which ran on rank ", owner, " in step ",
                                     forward.step, ": it must run inside that step"));
  }
  transport::Message request;
  request.kind = transport::Kind::kBackward;
  request.body = to_value(BackwardRequest{forward.counter, keep_graph, gradients});
  auto pending = start(owner, std::move(request), base::str("backward of ", name, " on rank ", owner));
  return to_tensors(pending.wait(plan::Phase::kBackward));
}

PendingResult RemoteCalls::start(base::Rank to, transport::Message request, std::string what) {
  const Activity& activity = *Activity::current();
  auto slot = std::make_shared<PendingResult::Slot>();
  slot->asked = to;
  slot->what = base::str(what, " (step ", activity.step(), ", microbatch ", activity.microbatch(), ")");
  request.caller = request.reply_to = transport_.rank();
  request.call = {transport_.rank(), activity.step(), activity.microbatch()};
  {
    std::lock_guard guard(mutex_);
    request.call.counter = counters_[activity.microbatch()]++;
    pending_[request.call] = slot;
  }
  transport_.send(to, request);
  return PendingResult(*this, request.call, std::move(slot));
}

void RemoteCalls::begin_step() {
  std::lock_guard guard(mutex_);
  pending_.clear();
  counters_.clear();
  cancelled_ = false;
  told_ = false;
}

std::string RemoteCalls::awaited_from(base::Rank rank) {
  std::lock_guard guard(mutex_);
  for (const auto& [id, slot] : pending_) {
    if (slot->asked == rank && !slot->answer) return slot->what;
  }
  return "";
}

void RemoteCalls::cancel() {
  std::lock_guard guard(mutex_);
  cancelled_ = true;
  for (auto& [id, slot] : pending_) slot->arrived.notify_all();
}

void RemoteCalls::deliver(transport::Message&& answer) {
  std::lock_guard guard(mutex_);
  const auto found = pending_.find(answer.call);
  if (found == pending_.end()) return;  // of a step that was cancelled
  found->second->answer = std::move(answer);
  found->second->arrived.notify_all();
}

}  // namespace lamina::pipeline
