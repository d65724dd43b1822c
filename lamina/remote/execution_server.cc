// SPDX-License-Identifier: Apache-2.0
// States of a request here (Parked):
//
//   received --its last input--> ready --the slot--> runs --finish()--> finished, and answered --the slot--> ended
//
// Received, it has neither thread nor slot: Parked counts what is missing. Ready, it has a place among those that want
// the slot, and a worker. A backward that is split gets the slot a second time, for its weight part.
//
// Threads: receive() and deliver() run in the transport's thread. What brings a request its last input makes it ready:
// the transport's thread, or the worker that finishes the call before it. serve() and fulfil() run in workers. Parked
// belongs to whoever fills it, each in a field of its own, until `missing` is 0, and then to its worker.
//
// Locks: mutex_, under which nothing else is taken: the modules, and the latest request of each rank. What a step keeps
// has its own: see served_calls.cc. See docs/thread-model.md.
#include "lamina/remote/execution_server.h"

#include <algorithm>
#include <atomic>

#include "lamina/remote/crossing.h"
#include "lamina/remote/data_watch.h"
#include "lamina/remote/outputs.h"
#include "lamina/remote/protocol.h"
#include "lamina/remote/signature.h"
#include "lamina/remote/views.h"
#include "lamina/runtime/modes.h"
#include "lamina/runtime/rng_streams.h"
#include "lamina/value/encoding.h"

namespace lamina::remote {
namespace {

using transport::Message;

value::Failure written_failure(const std::string& module, base::Rank rank) {
  const auto what = base::str("a result of ", module.empty() ? "the model" : module,
                              " was written to after it was returned and before it was read elsewhere; return a clone "
                              "of it, or have each call waited for: set_dynamic(module) before the first step");
  return {"UsageError", what, "", rank, {}};
}

template <class Predicate>
std::vector<Delivery> taken_if(std::vector<Delivery>& from, const Predicate& predicate) {
  const auto rest = std::ranges::stable_partition(from, std::not_fn(predicate));
  std::vector<Delivery> taken(rest.begin(), rest.end());
  from.erase(rest.begin(), rest.end());
  return taken;
}

base::CallId with_counter(base::CallId call, std::int64_t counter) {
  call.counter = counter;
  return call;
}

schedule::TurnName turn_of(const StepScope& step, const base::CallId& call) {
  const auto caller = std::ranges::find(step.pipeline, call.origin) - step.pipeline.begin();
  return {call.microbatch, base::Partition(caller), call.counter};
}

// The sum that an item of a list of gradients stands for.
at::Tensor summed(const value::Value& item) {
  const auto* parts = item.get_if<value::List>();
  if (parts == nullptr) return item.as<at::Tensor>();
  Tensors addends;
  for (const auto& part : parts->items) addends.push_back(summed(part));
  return value::Sum(std::move(addends)).take();
}

}  // namespace

// A request and what of its inputs has arrived.
struct ExecutionServer::Parked {
  explicit Parked(std::variant<ForwardRequest, BackwardRequest> request) : asked(std::move(request)) {}

  std::variant<ForwardRequest, BackwardRequest> asked;
  std::map<base::CallId, Arrival> inputs;      // its nodes are made before the first arrives
  std::shared_ptr<ServedCalls::Call> forward;  // of a backward: the call whose graph it runs
  std::atomic<int> missing = 1;
  WeightPart weights;  // of a backward that is split: what is left of it

  Request& request() {
    return std::visit([](auto& each) -> Request& { return each; }, asked);
  }
  const Request& request() const {
    return std::visit([](const auto& each) -> const Request& { return each; }, asked);
  }
  bool is_forward() const { return std::holds_alternative<ForwardRequest>(asked); }
  schedule::Phase phase() const { return is_forward() ? schedule::Phase::kForward : schedule::Phase::kBackward; }
  value::Value& tree() {
    return is_forward() ? std::get<ForwardRequest>(asked).arguments : std::get<BackwardRequest>(asked).gradients;
  }
  const std::string& flags() const {
    return is_forward() ? std::get<ForwardRequest>(asked).state.flags : std::get<BackwardRequest>(asked).flags;
  }

  // Puts what has arrived in the place of the references to it. Throws what came instead of an input.
  void fill() {
    value::for_each_leaf(tree(), [&](value::Value& leaf) {
      const auto* reference = leaf.get_if<value::Reference>();
      if (reference == nullptr) return;
      at::Tensor tensor = tensor_of(inputs.at(reference->name));
      tensor.set_requires_grad(reference->requires_grad);  // as the caller sees it, who may have detached it
      leaf = tensor;
    });
    inputs.clear();
  }
};

ExecutionServer::ExecutionServer(transport::Transport& transport, messaging::Handlers& handlers, Steps& steps,
                                 RemoteCalls& calls, value::Failures& failures)
    : transport_(transport), calls_(calls), failures_(failures) {
  const auto in_step = [&](transport::Kind kind, const Steps::Handle& handle) {
    handlers.on(kind, [&steps, handle](Message&& message) { steps.deliver(std::move(message), handle); });
  };
  in_step(kForward, [this](StepScope& step, Message&& message) {
    receive(step, std::make_shared<Parked>(to_forward_request(std::move(message))));
  });
  in_step(kBackward, [this](StepScope& step, Message&& message) {
    receive(step, std::make_shared<Parked>(to_backward_request(std::move(message))));
  });
  in_step(kAsk, [this](StepScope& step, Message&& message) { deliver(step, to_ask(message)); });
}

void ExecutionServer::set_modules(std::shared_ptr<model::Modules> modules) {
  std::lock_guard guard(mutex_);
  modules_ = std::move(modules);
}

std::string ExecutionServer::latest_of(base::Rank rank) {
  std::lock_guard guard(mutex_);
  const auto found = latest_.find(rank);
  if (found == latest_.end()) return "";
  if (modules_) found->second.name = modules_->name(found->second.module);
  return found->second.what();
}

void ExecutionServer::receive(StepScope& step, std::shared_ptr<Parked> parked) {
  auto& request = parked->request();
  for (const auto& release : request.released) step.served.forget(release);
  {
    std::lock_guard guard(mutex_);
    latest_[request.call.origin] = {request.call, transport_.rank(), request.module, "", !parked->is_forward()};
  }
  step.served.add(request.call, std::move(request.deliveries));
  await_inputs(step, parked);
}

// A caller may ask for the backward of a call before that has run, where it does not read the outputs. Calls that keep
// their order wait each for the one before it: see [Note: order of calls].
void ExecutionServer::await_inputs(StepScope& step, const std::shared_ptr<Parked>& parked) {
  const auto& request = parked->request();
  value::for_each_leaf(parked->tree(), [&](const value::Value& leaf) {
    if (const auto* reference = leaf.get_if<value::Reference>()) parked->inputs.try_emplace(reference->name);
  });
  parked->missing += static_cast<int>(parked->inputs.size());
  const auto one_more = [this, &step, parked] {
    if (--parked->missing != 0) return;
    const auto& call = parked->request().call;
    step.served.bursts.ready(call);
    const auto place = step.slot().reserve(parked->phase(), turn_of(step, call));
    step.serve([this, &step, parked, place] { serve(step, *parked, *place); });
  };
  const auto await = [&](const base::CallId& call) {
    ++parked->missing;  // first: it may end at once
    if (!step.served.await(call, one_more)) --parked->missing;
  };
  for (auto& [name, place] : parked->inputs) {
    step.deliveries.expect(name, [one_more, &place](Arrival arrival) {
      place = std::move(arrival);
      one_more();
    });
  }
  if (!parked->is_forward()) {
    const auto forward = with_counter(request.call, std::get<BackwardRequest>(parked->asked).forward);
    parked->forward = step.served.expect_backward(forward);  // where it is not here the backward says so
    await(forward);
  }
  if (request.after >= 0) await(with_counter(request.call, request.after));
  one_more();
}

void ExecutionServer::serve(StepScope& step, Parked& parked, runtime::ComputeSlot::Place& place) {
  const auto& request = parked.request();
  runtime::ExecutionContext context(step, place, turn_of(step, request.call), parked.phase());
  if ((context.recorder() || step.slot().in_team()) && modules_) context.set_name(modules_->name(request.module));
  if (request.after >= 0) issued(context).latest = step.served.take_order(with_counter(request.call, request.after));
  Answer answer{request.call};
  Tensors outputs;
  auto failure = failure_of(step, parked, [&] {
    parked.fill();
    if (step.flags) context.set_flags(step.flags->from_bytes(parked.flags()));
    const auto flags = context.flags();
    auto* const asks_forward = std::get_if<ForwardRequest>(&parked.asked);
    outputs = asks_forward != nullptr ? forward(step, *asks_forward, answer) : backward(step, parked, answer);
    require_flags(request, flags, context);
    issued(context).learn_views();
  });
  if (failure) parked.weights = nullptr;
  answer.note = context.take_note();
  finish(step, parked, std::move(outputs), std::move(failure), std::move(answer), context);
}

template <class Run>
std::optional<value::Failure> ExecutionServer::failure_of(StepScope& step, const Parked& parked, const Run& run) {
  try {
    run();
    return std::nullopt;
  } catch (const base::CancelledError&) {
    throw;
  } catch (const base::PeerError&) {
    throw;
  } catch (...) {
    // Described in any case: until then a face may keep the error in this thread, where the next request would meet it.
    auto failure = failures_.describe_to_send(std::current_exception(), transport_.rank());
    if (failure.traceback.empty() && modules_) {  // C++ has none
      const auto& request = parked.request();
      const auto* const part = parked.is_forward() ? "forward" : "backward";
      failure.traceback =
          base::str("in the ", part, " of ", modules_->name(request.module), ", called by rank ", request.call.origin);
    }
    if (step.slot().cancelled()) throw;  // a consequence of the error that ended the step, which is announced by itself
    // The caller hears of an answer when its turn comes, which may wait for a collective that the team is in here.
    if (step.slot().in_team()) throw value::RemoteFailure(failure);
    return failure;
  }
}

void ExecutionServer::require_flags(const Request& request, const runtime::ParameterFlags::Flags& given,
                                    runtime::ExecutionContext& context) {
  const auto& flags = context.step().flags;
  if (!flags) return;
  const auto name = flags->difference(given, context.flags());
  if (name.empty()) return;
  throw base::UsageError(
      base::str(modules_->name(request.module), " changed requires_grad of ", name, " on rank ", transport_.rank(),
                ", which its caller on another rank does not see: set it in the body of the step "
                "function, or before the step on every rank"),
      base::Code{"step-frozen-remotely"});
}

Tensors ExecutionServer::forward(StepScope& step, ForwardRequest& request, Answer& answer) {
  base::internal_check(modules_ != nullptr, "a rank was asked to run a module before it has a model");
  const auto& state = request.state;
  if (!request.news.empty()) modules_->hear(request.news);
  auto graph = std::make_shared<CalleeGraph>(request.arguments);
  const auto arguments = distinct_tensors(request.arguments);
  const auto before = versions(arguments);
  ForwardAnswer result;
  {
    std::optional<DataWatch> watch;
    if (request.expected == 0) watch.emplace();
    std::optional<runtime::RngStream> stream;
    std::optional<runtime::GivenSeeds> seeds;
    if (modules_->starts_rng_stream(request.module)) {
      stream.emplace(state.seeds.at(0));
    } else {
      seeds.emplace(state.seeds);
    }
    runtime::run_with_modes(state.modes, [&] {
      result.outputs = modules_->call(request.module, state.of_face, std::move(request.arguments));
    });
    result.saw_data = watch && watch->saw_data();
  }
  require_results_cross(modules_->name(request.module), result.outputs);
  replace_arguments(result.outputs, arguments);
  result.views = views(result.outputs, arguments);
  result.written = written(arguments, before);
  copy_what_others_hold(result.outputs);
  Tensors outputs;
  if (request.expected != 0) {
    const auto found = output_spec(result.outputs, result.views);
    if (!found || found->fingerprint != request.expected || !result.written.items.empty()) {
      throw_unexpected(modules_->name(request.module), "the results of");
    }
    outputs = distinct_tensors(result.outputs);
  }
  graph->set_outputs(value::Tuple{{result.outputs, result.written}});
  if (request.expected == 0) {
    result.reached = graph->reached();
    answer.result = to_value(std::move(result));
    value::for_each_tensor(answer.result, value::materialise);
    make_dense(answer.result);
  }
  if (graph->differentiable()) step.served.keep_graph(request.call, std::move(graph));
  return outputs;
}

Tensors ExecutionServer::backward(StepScope& step, Parked& parked, Answer& answer) {
  auto& request = std::get<BackwardRequest>(parked.asked);
  Tensors gradients;
  const auto arrived = std::exchange(request.gradients, {});
  for (const auto& item : arrived.as<value::List>().items) gradients.push_back(summed(item));
  std::shared_ptr<CalleeGraph> graph;
  if (parked.forward) graph = step.served.graph_of(*std::exchange(parked.forward, nullptr), request.options.keep_graph);
  if (!graph) {
    throw base::UsageError("backward through a call a second time: its graph is gone; keep it with retain_graph=True",
                           base::Code{"step-backward-twice"});
  }
  auto options = request.options;
  options.asked = step.calls.asked(request.call.microbatch);
  Tensors result;
  if (step.splits(request.call.microbatch)) {
    auto part = graph->backward_of_inputs(gradients, options);
    result = std::move(part.gradients);
    parked.weights = std::move(part.rest);
  } else {
    result = graph->backward(gradients, options);
  }
  if (request.expected == 0) {
    for (const auto& gradient : result) value::materialise(gradient);
    answer.result = to_value(result);
    return {};
  }
  if (fingerprint(pattern(result)) != request.expected) {
    throw_unexpected(modules_->name(request.module), "the gradients of the arguments of");
  }
  return result;
}

void ExecutionServer::finish(StepScope& step, Parked& parked, Tensors outputs, std::optional<value::Failure> failure,
                             Answer&& answer, runtime::ExecutionContext& context) {
  const auto& request = parked.request();
  const auto caller = request.call.origin;
  const auto held = failure ? Issued::Held() : issued(context).held(outputs);
  auto results = Results(modules_ ? modules_->name(request.module) : "", std::move(outputs), !parked.is_forward());
  const auto garbage = step.served.take_garbage();
  auto ended = step.served.finish(request.call, results, failure, issued(context).latest);
  if (!ended) return;  // the step is over
  auto& [owed, readers] = *ended;
  for (const auto& reader : readers) reader();
  // Before another gets the slot: what goes on here with these results is among those that it may pass to.
  const auto here = [&](const Delivery& delivery) {
    return delivery.to == transport_.rank() && (failure || !value::is_pending(results.tensors.at(delivery.output)));
  };
  fulfil(step, taken_if(owed, here), results, failure);
  // A note holds for whatever the caller does next: no answer of the one that the slot passes to may overtake it.
  const bool noted = !answer.note.empty();
  const auto give_slot_up = [&] { parked.weights ? context.leave(schedule::Phase::kWeights) : context.retire(); };
  if (!noted) give_slot_up();
  // Deliveries to the caller itself go with the answer.
  const auto elsewhere = [&](const Delivery& delivery) {
    if (delivery.to != caller) return true;
    return !failure && (value::is_pending(results.tensors.at(delivery.output)) || results.written(delivery.output));
  };
  fulfil(step, taken_if(owed, elsewhere), results, failure);
  for (const auto& delivery : owed) {
    answer.names.push_back(delivery.name);
    if (!failure) answer.outputs.push_back(results.delivered(delivery.output));
  }
  answer.failure = failure;
  results = {};
  const bool done = answer.done = failure || (!parked.weights && held.empty() && !calls_.unsettled(context));
  const bool says_more = failure || !answer.names.empty() || noted || request.expected == 0 || !done;
  for (auto& due : step.served.bursts.due(std::move(answer), says_more))
    transport_.send(caller, to_message(std::move(due)));
  if (noted) give_slot_up();
  if (done) return;
  Answer end{request.call};
  if (parked.weights) {
    end.failure = failure_of(step, parked, [&] {
      context.go_on();
      std::exchange(parked.weights, nullptr)();
    });
    context.retire();
  }
  try {
    if (!end.failure) calls_.settle(context, held);
  } catch (const value::RemoteFailure& late) {
    end.failure = late.failure();
  }
  transport_.send(caller, to_message(std::move(end)));
}

void ExecutionServer::deliver(StepScope& step, const Ask& ask) {
  auto made = step.served.ask(ask, transport_.rank());
  if (!made) return;  // it is owed
  step.serve([this, &step, delivery = ask.delivery, made = std::move(*made)] {
    fulfil(step, {delivery}, made.results, made.failure);
  });
}

void ExecutionServer::fulfil(StepScope& step, const std::vector<Delivery>& owed, const Results& results,
                             const std::optional<value::Failure>& failure) {
  // Readers get memory of their own: what shares memory here goes in parcels of its own.
  using Place = std::pair<base::Rank, int>;
  std::map<Place, Values> parcels;
  std::map<std::pair<base::Rank, const void*>, int> uses;
  for (const auto& delivery : owed) {
    Place place{delivery.to, 0};
    if (!failure) {
      const auto& output = results.tensors.at(delivery.output);
      if (results.written(delivery.output)) {
        fulfil(step, {delivery}, {}, written_failure(results.module, transport_.rank()));
        continue;
      }
      if (const auto elsewhere = remote_value_of(output)) {
        elsewhere->redirect(delivery);
        continue;
      }
      value::materialise(output);
      place.second = uses[{delivery.to, output.storage().unsafeGetStorageImpl()}]++;
      std::get<Tensors>(parcels[place].values).push_back(results.delivered(delivery.output));
    }
    parcels[place].names.push_back(delivery.name);
  }
  for (auto& [place, parcel] : parcels) {
    if (failure) parcel.values = *failure;
    if (place.first != transport_.rank()) {
      transport_.send(place.first, to_message(std::move(parcel)));
      continue;
    }
    if (!failure) parcel.values = to_tensors(value::copied(to_value(std::get<Tensors>(parcel.values))));
    step.deliveries.arrive(std::move(parcel));
  }
}

}  // namespace lamina::remote
