// SPDX-License-Identifier: Apache-2.0
// Threads: a context calls, waits and settles in its own, and what it has called (Issued) has no lock. receive() runs
// in the transport's thread.
//
// Locks: mutex_, under which nothing else is taken: what was asked last of each rank, and notes. The calls of a step
// have theirs: see outstanding_calls.cc. Nothing is sent, and no code of a face runs, under any. See
// docs/thread-model.md.
#include "lamina/remote/remote_calls.h"

#include <ATen/ops/copy.h>

#include <algorithm>

#include "lamina/faces/sayings.h"
#include "lamina/remote/crossing.h"
#include "lamina/remote/data_watch.h"
#include "lamina/remote/protocol.h"
#include "lamina/remote/thread_backwards.h"
#include "lamina/runtime/modes.h"
#include "lamina/runtime/rng_streams.h"
#include "lamina/value/gradient_sums.h"
#include "lamina/value/released.h"

namespace lamina::remote {

std::int64_t& thread_backwards() {
  thread_local std::int64_t count = 0;
  return count;
}
namespace {

using transport::Message;

// A turn of a team ends at each read, also where the value is there: see [Note: turns of a team].
bool read_ends_turn() {
  const auto* context = runtime::ExecutionContext::current();
  return context != nullptr && context->step().slot().in_team();
}

// The key that calls which are alike have in common: see [Note: prediction].
std::string kind_of(base::ModuleId id, const std::string& state, const value::Value& arguments) {
  return base::str(id, '|', state) + signature(arguments);
}

observe::Event wait_for(const IssuedCall& call) {
  return {.what = observe::What::kWait,
          .step = call.id.step.value,
          .microbatch = call.id.microbatch.value,
          .name = call.what(),
          .peer = call.owner.value};
}

// Puts the call's arguments in the place of the references that stand for them.
void hand_back(value::Value& outputs, const std::vector<at::Tensor>& arguments) {
  value::for_each_leaf(outputs, [&](value::Value& leaf) {
    if (const auto* reference = leaf.get_if<value::Reference>()) leaf = at::Tensor(arguments.at(reference->argument));
  });
}

// The module wrote to its copies of arguments: so does the caller, to its own.
void write_arguments(const std::string& module, const value::List& written, const std::vector<at::Tensor>& arguments) {
  for (const auto& pair : written.items) {
    const auto& parts = pair.as<value::Tuple>().items;
    const auto& argument = arguments.at(parts.at(0).as<std::int64_t>());
    const auto& now = parts.at(1).as<at::Tensor>();
    if (argument.sizes() != now.sizes()) {
      throw base::UsageError(
          base::str(module, ", which lives on another rank, changed the shape of an argument from ", argument.sizes(),
                    " to ", now.sizes(), " in place, which does not reach its caller; return the changed tensor"),
          base::Code{"step-argument-changed"});
    }
    argument.copy_(now);
  }
}

at::Tensor told(const Arrival& arrival, const base::CallId& id) {
  if (const auto* failure = std::get_if<value::Failure>(&arrival)) tell(id, *failure);
  return tensor_of(arrival);
}

// Throws where the gradient of a leaf is made on another rank.
void require_here(const Tensors& asked) {
  for (const auto& leaf : asked) {
    if (!value::is_released(leaf)) continue;
    throw faces::refusal("gradient-elsewhere", value::where_released(leaf));
  }
}

}  // namespace

RemoteCalls::RemoteCalls(transport::Transport& transport, messaging::Handlers& handlers, Steps& steps,
                         base::Clock::duration timeout, runtime::WorkerPool::Hooks hooks, bool predicts)
    : transport_(transport),
      steps_(steps),
      patience_{timeout, nullptr,
                [](const std::string& line) {
                  const auto* context = runtime::ExecutionContext::current();
                  if (context == nullptr || scope_of(*context).calls.says_first()) base::log_warning(line);
                },
                base::str("rank ", transport.rank(), " waited for the ")},
      hooks_(std::move(hooks)),
      predicts_(predicts) {
  value::set_waits_alike(&read_ends_turn);
  for (const auto kind : {kResult, kError}) {
    handlers.on(kind, [this](Message&& message) {
      steps_.deliver(std::move(message),
                     [this](StepScope& step, Message&& answer) { receive(step, to_answer(std::move(answer))); });
    });
  }
  handlers.on(kValues, [this](Message&& message) {
    steps_.deliver(std::move(message),
                   [](StepScope& step, Message&& values) { step.deliveries.arrive(to_values(std::move(values))); });
  });
}

value::Value RemoteCalls::call(base::Rank owner, base::ModuleId id, model::Modules& modules, value::Value arguments) {
  const auto pending = begin({{}, owner, id, modules.name(id)});
  const auto& call = pending->call;
  require_can_cross(call->name, arguments);
  ForwardRequest request;
  CallState& state = request.state;
  auto [of_face, news] = modules.capture_state(id);
  request.news = std::move(news);
  state = {runtime::capture_modes(),
           {},
           std::move(of_face),
           runtime::ParameterFlags::to_bytes(runtime::ExecutionContext::current()->flags())};
  call->profile = profiles_.of(kind_of(id, to_bytes(state), arguments));
  call->ordinal = issued(*runtime::ExecutionContext::current()).counts[call->profile.get()]++;
  const auto output_spec = !predicts_ || modules.dynamic(id) ? nullptr : call->profile->output_spec();
  for (int left = modules.rng_streams(id); left > 0; --left) state.seeds.push_back(runtime::next_seed());
  request.arguments = departing(arguments, *pending);
  const auto given = distinct_tensors(arguments);

  // Without grad mode too: the module may return what had a graph before, a parameter.
  const auto graph = std::make_shared<Lease>(releases_, owner, call->id, /*graph=*/true);
  const auto run_backward = [this, alive = std::weak_ptr(alive_), call, graph](const Tensors& gradients,
                                                                               const BackwardOptions& options,
                                                                               const GradientTargets& targets) {
    if (alive.expired())
      throw base::UsageError(base::str(call->what(), ": backward after its job was shut down"),
                             base::Code{"step-after-shutdown"});
    if (!options.keep_graph) graph->spend();
    return backward(*call, gradients, options, targets);
  };
  CallerGraph node(arguments, call->name, owner, run_backward);
  if (output_spec) {
    auto outputs = expected_outputs(*pending, *output_spec, request);
    send(pending, std::move(request));
    node.attach(outputs, output_spec->reached);
    auto shared = share_views(outputs, output_spec->views, given, output_spec->fetches_views);
    if (shared.left_apart)
      issued(*runtime::ExecutionContext::current()).views.push_back({call, std::nullopt, std::move(shared)});
    hand_back(outputs, given);
    return outputs;
  }
  send(pending, std::move(request));
  auto body = wait_answer(*pending);
  auto answer = to_forward_answer(body);
  node.attach(body, answer.reached);
  if (answer.saw_data) DataWatch::note();
  const bool predictable = !answer.saw_data && answer.written.items.empty();
  auto learned = predictable ? remote::output_spec(answer.outputs, answer.views) : std::nullopt;
  if (learned) learned->reached = answer.reached;
  write_arguments(call->name, answer.written, given);
  auto shared = share_views(answer.outputs, answer.views, given, /*fetches=*/true);
  if (!answer.views.empty() && learned) {
    issued(*runtime::ExecutionContext::current()).views.push_back({call, std::move(learned), std::move(shared)});
  } else {
    call->profile->learn_output_spec(std::move(learned));
  }
  hand_back(answer.outputs, given);
  return std::move(answer.outputs);
}

// The outputs as references. They are sent at once to the ranks that read them the last time.
value::Value RemoteCalls::expected_outputs(const PendingCall& pending, const OutputSpec& output_spec,
                                           Request& request) {
  const auto& call = *pending.call;
  request.expected = output_spec.fingerprint;
  std::vector<std::vector<Delivery>> prepared(output_spec.outputs.size());
  for (const auto& [output, reader] : call.profile->route(call.ordinal)) {
    const Delivery delivery{output, reader, new_delivery(call)};
    prepared.at(output).push_back(delivery);
    request.deliveries.push_back(delivery);
  }
  const auto lease = std::make_shared<const Lease>(releases_, call.owner, call.id, /*graph=*/false);
  std::vector<at::Tensor> tensors;
  for (std::size_t i = 0; i < output_spec.outputs.size(); ++i) {
    tensors.push_back(reference(pending, static_cast<std::int64_t>(i), output_spec.outputs[i].spec,
                                value::Strides::kAsSpecified, lease, std::move(prepared[i])));
    tensors.back().set_requires_grad(output_spec.outputs[i].requires_grad);
  }
  return filled(output_spec, tensors);
}

at::Tensor RemoteCalls::reference(const PendingCall& pending, std::int64_t output, const value::TensorSpec& spec,
                                  value::Strides strides, std::shared_ptr<const Lease> lease,
                                  std::vector<Delivery> prepared) {
  const auto source = std::make_shared<RemoteValue>(static_cast<Fetcher&>(*this), alive_, pending.call,
                                                    std::move(lease), output, std::move(prepared));
  auto tensor = value::make_reference(spec, source, strides);
  issued(*runtime::ExecutionContext::current()).references.emplace_back(source);
  return tensor;
}

Tensors RemoteCalls::backward(const IssuedCall& forward, const Tensors& gradients, const BackwardOptions& options,
                              const GradientTargets& targets) {
  runtime::ExecutionContext* context = runtime::ExecutionContext::current();
  if (context == nullptr || context->step().number() != forward.id.step) {
    throw base::UsageError(base::str("backward through the ", forward.what(), ": it must run inside that step"),
                           base::Code{"step-earlier-graph"});
  }
  require_here(options.asked);
  if (!options.asked.empty()) scope_of(*context).calls.ask_for(forward.id.microbatch, options.asked);
  ++backwards_;
  if (options.accumulate) ++thread_backwards();
  const auto pending = begin({{}, forward.owner, forward.module, forward.name, /*backward=*/true});
  const auto& call = *pending->call;
  BackwardRequest request;
  request.flags = runtime::ParameterFlags::to_bytes(context->flags());
  pending->given.push_back(forward.id.counter);
  request.forward = forward.id.counter;
  request.options = options;
  auto& departed = request.gradients.as<value::List>().items;
  for (const auto& gradient : gradients) departed.push_back(departing_gradient(gradient, *pending));
  const auto given = pattern(gradients);
  const auto known = predicts_ ? forward.profile->gradient_pattern(given) : std::nullopt;
  if (!known || known->size() != targets.size()) {
    send(pending, std::move(request));
    auto result = to_tensors(wait_answer(*pending));
    for (std::size_t i = 0; i < result.size(); ++i) {
      const bool lost = result[i].defined() && i < targets.size() && targets[i].kind == GradientTarget::Kind::kNowhere;
      if (lost) throw_unexpected(forward.name, "the gradients of the arguments of");
    }
    forward.profile->learn_gradient_pattern(given, pattern(result));
    return result;
  }
  request.expected = fingerprint(*known);
  const auto lease = std::make_shared<const Lease>(releases_, call.owner, call.id, /*graph=*/false);
  Tensors result(targets.size());
  for (std::size_t i = 0; i < targets.size(); ++i) {
    using TargetKind = GradientTarget::Kind;
    const auto& target = targets[i];
    if ((*known)[i] == '0') continue;
    if (target.kind == TargetKind::kNowhere) throw_unexpected(forward.name, "the gradients of the arguments of");
    const auto output = static_cast<std::int64_t>(i);
    std::vector<Delivery> prepared;
    if (target.kind != TargetKind::kCaller) {
      const auto reader = target.kind == TargetKind::kHere ? rank() : target.rank;
      prepared.push_back({output, reader, new_delivery(call)});
      request.deliveries.push_back(prepared.back());
    }
    result[i] = reference(*pending, output, target.spec, value::Strides::kAsTheyArrive, lease, std::move(prepared));
  }
  send(pending, std::move(request));
  for (std::size_t i = 0; i < targets.size(); ++i) {
    if (targets[i].kind == GradientTarget::Kind::kHere) value::materialise(result[i]);
  }
  return result;
}

value::Value RemoteCalls::departing(value::Value tree, PendingCall& to) {
  std::map<const void*, value::Reference> sent;
  value::for_each_leaf(tree, [&](value::Value& leaf) {
    if (const auto* opaque = leaf.get_if<value::Opaque>()) {
      for (const auto& tensor : opaque->tensors) value::materialise(tensor);
    }
    const auto* tensor = leaf.get_if<at::Tensor>();
    if (tensor == nullptr || !value::is_pending(*tensor)) return;
    const auto source = remote_value_of(*tensor);
    if (!source || source->taken()) return value::materialise(*tensor);
    const auto [place, fresh] = sent.try_emplace(tensor->unsafeGetTensorImpl());
    if (fresh) place->second = {source->route_to(to.call->owner), 0, tensor->requires_grad()};
    to.given.push_back(source->call().counter);
    leaf = place->second;
  });
  return tree;
}

value::Value RemoteCalls::departing_gradient(const at::Tensor& gradient, PendingCall& to) {
  if (!value::is_pending(gradient)) return gradient;
  if (const auto sum = std::dynamic_pointer_cast<value::Sum>(value::source_of(gradient))) {
    value::List parts;
    for (const auto& part : sum->parts()) parts.items.push_back(departing_gradient(part, to));
    return parts;
  }
  return departing(gradient, to);
}

RemoteCalls::Pending RemoteCalls::begin(IssuedCall call) {
  const runtime::ExecutionContext& context = *runtime::ExecutionContext::current();
  auto& step = scope_of(context);
  call.id = step.calls.new_call(rank(), step.number(), context.microbatch());
  auto pending = std::make_shared<PendingCall>();
  pending->call = std::make_shared<IssuedCall>(std::move(call));
  return pending;
}

template <class AnyRequest>
void RemoteCalls::send(const Pending& pending, AnyRequest&& request) {
  const auto& call = *pending->call;
  auto& made = issued(*runtime::ExecutionContext::current());
  made.calls.push_back(pending);
  runtime::ExecutionContext::current()->note(schedule::TurnAct::kCall,
                                             base::str(call.backward ? "backward" : "forward", " of ", call.name));
  const auto [latest, first] = made.latest.try_emplace({call.module, call.backward}, call.id.counter);
  if (!first) request.after = std::exchange(latest->second, call.id.counter);
  scope_of(*runtime::ExecutionContext::current()).calls.add(pending);
  {
    std::lock_guard guard(mutex_);
    latest_[call.owner] = pending->call;
  }
  request.call = call.id;
  request.module = call.module;
  request.released = releases_->take(call.owner);
  transport_.send(call.owner, to_message(std::forward<AnyRequest>(request)));
}

value::Value RemoteCalls::wait_answer(PendingCall& pending) {
  auto& calls = scope_of(*runtime::ExecutionContext::current()).calls;
  std::optional<value::Failure> failure;
  give_way(*pending.call,
           [&](const std::function<void()>& ready) { failure = calls.wait_answer(pending, patience_, ready); });
  if (failure) tell(pending.call->id, *failure);
  return std::move(*pending.answer);
}

void RemoteCalls::settle(runtime::ExecutionContext& context, const Issued::Held& held) {
  issued(context).settle(held, scope_of(context).calls, patience_);
}

bool RemoteCalls::unsettled(runtime::ExecutionContext& context) {
  return !scope_of(context).calls.all_done(issued(context).calls);
}

std::shared_ptr<StepScope> RemoteCalls::step_of(const IssuedCall& call) {
  auto step = steps_.find(call.id.step);
  if (step) return step;
  throw base::UsageError(base::str("a result of the ", call.what(), " is read after its step, which did not end well"),
                         base::Code{"step-earlier-graph"});
}

base::CallId RemoteCalls::new_delivery(const IssuedCall& call) {
  return step_of(call)->calls.new_delivery(rank(), call.id.step, call.id.microbatch);
}

void RemoteCalls::ask(const IssuedCall& call, const Delivery& delivery) {
  transport_.send(call.owner, to_message(Ask{call.id, delivery}));
}

at::Tensor RemoteCalls::receive(const base::CallId& name, const IssuedCall& call) {
  const auto step = step_of(call);
  auto arrival = ends_turns() ? std::nullopt : step->deliveries.poll(name);
  if (!arrival) {
    give_way(call, [&](const std::function<void()>& ready) {
      arrival = step->deliveries.wait(name, patience_, [&] { return call.what(); }, ready);
    });
  }
  return told(*arrival, call.id);
}

bool RemoteCalls::ends_turns() const { return read_ends_turn(); }

void RemoteCalls::give_way(const IssuedCall& awaited, const Wait& wait) {
  runtime::ExecutionContext* const context = runtime::ExecutionContext::current();
  const auto ready = [context] {
    if (context != nullptr) context->take_place();
  };
  const auto recorded = [&] {
    const observe::Span span(context ? context->recorder() : nullptr, [&] { return wait_for(awaited); });
    wait(ready);
  };
  const auto without_slot = [&] { context ? context->without_slot(context->phase(), recorded) : recorded(); };
  hooks_.blocking ? hooks_.blocking(without_slot) : without_slot();
}

std::string RemoteCalls::asked_of(base::Rank rank) {
  const auto step = steps_.open();
  const auto waited = step ? step->calls.asked_of(rank) : "";
  if (!waited.empty()) return waited;
  std::lock_guard guard(mutex_);
  const auto found = latest_.find(rank);
  return found == latest_.end() ? "" : base::str("after it had answered the ", found->second->what());
}

std::vector<std::string> RemoteCalls::take_notes() {
  if (!noted_) return {};
  std::lock_guard guard(mutex_);
  noted_ = false;
  return std::exchange(notes_, {});
}

void RemoteCalls::receive(StepScope& step, Answer&& answer) {
  if (answer.failure) {
    step.deliveries.arrive({std::move(answer.names), *answer.failure});
  } else {
    step.deliveries.arrive({std::move(answer.names), std::move(answer.outputs)});
  }
  if (!answer.note.empty()) {
    std::lock_guard guard(mutex_);
    notes_.push_back(std::move(answer.note));
    noted_ = true;
  }
  step.calls.answer(std::move(answer));
}

}  // namespace lamina::remote
