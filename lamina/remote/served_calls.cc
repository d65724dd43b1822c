// SPDX-License-Identifier: Apache-2.0
// States of a call here, under mutex_:
//
//   added --finish()--> finished --released, or close()--> forgotten
//
// Until it has finished, deliveries that are asked for are owed. Finished, its outputs and its graph stay until the
// caller releases them, each by itself; what is asked for then is sent at once.
//
// Threads: requests come, and releases, in the transport's thread; calls run and finish in workers.
//
// Locks: mutex_, under which nothing else is taken. Readers are told, and what may hold objects of Python is destroyed,
// without it. See docs/thread-model.md.
#include "lamina/remote/served_calls.h"

#include "lamina/remote/outputs.h"
#include "lamina/remote/views.h"

namespace lamina::remote {

Results::Results(std::string made_by, Tensors made, bool are_gradients)
    : module(std::move(made_by)),
      tensors(std::move(made)),
      gradients(are_gradients),
      versions(remote::versions(tensors)) {}

// A gradient keeps its strides, which may be those of one element for all.
at::Tensor Results::delivered(std::int64_t output) const {
  return gradients ? tensors.at(output) : dense(tensors.at(output));
}

bool Results::written(std::int64_t output) const {
  return value::version_of(tensors.at(output)) != versions.at(output);
}

void ServedCalls::add(const base::CallId& id, std::vector<Delivery> owed) {
  auto call = std::make_shared<Call>();
  call->owed = std::move(owed);
  std::lock_guard guard(mutex_);
  calls_[id] = std::move(call);
}

bool ServedCalls::await(const base::CallId& id, const Reader& reader) {
  std::lock_guard guard(mutex_);
  const auto found = calls_.find(id);
  if (found == calls_.end() || found->second->finished) return false;
  found->second->readers.push_back(reader);
  return true;
}

std::shared_ptr<ServedCalls::Call> ServedCalls::expect_backward(const base::CallId& forward) {
  std::lock_guard guard(mutex_);
  const auto found = calls_.find(forward);
  if (found == calls_.end()) return nullptr;
  ++found->second->backwards;
  return found->second;
}

std::shared_ptr<CalleeGraph> ServedCalls::graph_of(Call& forward, bool keep) {
  std::lock_guard guard(mutex_);
  --forward.backwards;
  if (forward.failure) throw value::RemoteFailure(*forward.failure);
  const bool last = forward.graph_released && forward.backwards == 0;
  return keep && !last ? forward.graph : std::exchange(forward.graph, nullptr);
}

void ServedCalls::keep_graph(const base::CallId& id, std::shared_ptr<CalleeGraph> graph) {
  std::lock_guard guard(mutex_);
  const auto found = calls_.find(id);
  const bool wanted = found != calls_.end() && !(found->second->graph_released && found->second->backwards == 0);
  if (wanted) found->second->graph = std::move(graph);
}

CallOrder ServedCalls::take_order(const base::CallId& id) {
  std::lock_guard guard(mutex_);
  auto found = orders_.extract(id);
  return found ? std::move(found.mapped()) : CallOrder();
}

std::optional<ServedCalls::End> ServedCalls::finish(const base::CallId& id, const Results& results,
                                                    std::optional<value::Failure> failure, const CallOrder& order) {
  std::lock_guard guard(mutex_);
  const auto found = calls_.find(id);
  if (found == calls_.end()) return std::nullopt;
  auto& call = *found->second;
  End end{std::exchange(call.owed, {}), std::exchange(call.readers, {})};
  call.finished = true;
  if (!order.empty()) orders_[id] = order;
  call.failure = std::move(failure);
  if (!call.outputs_released) call.results = results;
  if (!call.failure && call.results.tensors.empty() && !call.graph) calls_.erase(found);
  return end;
}

std::optional<ServedCalls::Made> ServedCalls::ask(const Ask& ask, base::Rank self) {
  std::lock_guard guard(mutex_);
  const auto found = calls_.find(ask.call);
  if (found == calls_.end()) {
    return Made{{}, value::Failure{"UsageError", "a result was asked for after it was released", "", self, {}}};
  }
  auto& call = *found->second;
  if (call.finished) return Made{call.failure ? Results() : call.results, call.failure};
  call.owed.push_back(ask.delivery);
  return std::nullopt;
}

void ServedCalls::forget(const Release& release) {
  std::lock_guard guard(mutex_);
  const auto found = calls_.find(release.call);
  if (found == calls_.end()) return;
  auto& call = *found->second;
  (release.graph ? call.graph_released : call.outputs_released) = true;
  if (!release.graph) garbage_.push_back(std::make_shared<Results>(std::exchange(call.results, {})));
  if (release.graph && call.backwards == 0) garbage_.push_back(std::exchange(call.graph, nullptr));
  const bool tells = call.failure && !(call.outputs_released && call.graph_released);
  if (call.finished && !call.graph && call.results.tensors.empty() && !tells) calls_.erase(found);
}

ServedCalls::Garbage ServedCalls::take_garbage() {
  std::lock_guard guard(mutex_);
  return std::exchange(garbage_, {});
}

void ServedCalls::close() {
  decltype(calls_) ended;  // destroyed outside the lock
  Garbage garbage;
  {
    std::lock_guard guard(mutex_);
    garbage.swap(garbage_);
    ended.swap(calls_);
    orders_.clear();
  }
  for (auto& [id, call] : ended) call->readers.clear();  // a backward that waits for its forward keeps it
}

}  // namespace lamina::remote
