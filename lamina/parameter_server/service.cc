// SPDX-License-Identifier: Apache-2.0
// States of a request here: received, (a call or a backward: waits for its turn,) runs, answered. A find may wait for
// what it asks for; it has no thread meanwhile.
//
// Threads: receive(), end_served() and lose() run in the transport's thread, which hands over to workers. That thread
// also makes this rank's part of a context, so that the context's end, which comes later, finds it. Threads that call,
// step or place are the program's, or workers that run modules of the face.
//
// Locks, in order: a turn (turns.h) is held while a module runs, and paused while it waits for another rank. Then comes
// a context's lock, or those of parameters. A request is sent under a context's lock, and loopback receives it at once,
// so mutex_ comes last. Nobody takes a turn, or waits for another rank, with one of them.
#include "lamina/parameter_server/service.h"

#include <ATen/Parallel.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cmath>
#include <exception>
#include <optional>
#include <random>
#include <utility>

#include "lamina/base/log.h"
#include "lamina/base/str.h"
#include "lamina/device/copies.h"
#include "lamina/optim/registry.h"
#include "lamina/optim/step.h"
#include "lamina/runtime/modes.h"
#include "lamina/value/numbers.h"

namespace lamina::parameter_server {
namespace {

using base::Code;
using base::UsageError;
using value::Value;

constexpr auto kEndOfWork = std::chrono::seconds(30);  // for threads in the user's code, when the job ends

// This thread serves a call in a context, or in none, while it lives.
class InContext {
 public:
  explicit InContext(std::shared_ptr<AutogradContext> context)
      : before_(std::exchange(current_context(), std::move(context))) {}
  ~InContext() { current_context() = before_; }
  InContext(const InContext&) = delete;

 private:
  const std::shared_ptr<AutogradContext> before_;
};

std::int64_t random_number() {
  std::random_device random;
  return static_cast<std::int64_t>(((std::uint64_t{random()} << 32) | random()) >> 1);
}

}  // namespace

Service::Service(Options options, messaging::Messenger& messenger)
    : options_(std::move(options)),
      failures_(options_.failures ? options_.failures : std::make_shared<value::Failures>()),
      messenger_(messenger),
      job_(random_number()),
      threads_(std::make_shared<optim::Threads>(at::get_num_threads())),
      requests_(messenger),
      owned_(messenger.rank(), job_),
      trainer_(messenger.rank(), job_, requests_),
      pool_(std::make_unique<runtime::WorkerPool>(options_.thread_hooks)) {
  messenger_.handlers().on(kRequest, [this](transport::Message&& message) { receive(std::move(message)); });
  messenger_.handlers().on(kContextEnd, [this](transport::Message&& message) {
    end_served(to_ended_context(message), /*origin_lost=*/false);
  });
  messenger_.watch({[](base::Rank) { return std::string(); }, [this](const base::Loss& loss) { lose(loss); }});
}

Service::~Service() { end(); }

base::Patience Service::patience() const {
  base::Patience patience{options_.timeout};
  patience.who = base::str("rank ", rank(), " waited for ");
  return patience;
}

RemoteModule Service::place(Placed placed) {
  auto module = owned_.place(std::move(placed));
  std::vector<Request> waiting;
  {
    const std::lock_guard guard(mutex_);
    if (auto found = waiting_.extract(module.name)) waiting = std::move(found.mapped());
  }
  for (const auto& request : waiting) answer(request.asker, {request.number, to_value(module), {}});
  return module;
}

void Service::serve(const base::Patience& patience) {
  const auto others = static_cast<std::size_t>(messenger_.transport().size()) - 1;
  std::unique_lock lock(mutex_);
  last_request_ = base::Clock::now();
  while (lost_.size() < others && !ended_) {
    changed_.wait_for(lock, base::kInterruptSlice);
    if (running_ == 0 && base::Clock::now() - last_request_ > patience.timeout) {
      throw base::TimeoutError(base::str("serve() on rank ", rank(), ": no request for ",
                                         std::chrono::duration_cast<std::chrono::seconds>(patience.timeout).count(),
                                         " s, and ", others - lost_.size(),
                                         " ranks have not left; raise timeout_s if they need longer"));
    }
    if (!patience.check_interrupt) continue;
    lock.unlock();
    patience.check_interrupt();
    lock.lock();
  }
}

// The owner's side, as requests come.

void Service::start(std::function<void()> task) {
  {
    const std::lock_guard guard(mutex_);
    if (ended_) return;
    ++running_;
  }
  const auto done = [this] {
    const std::lock_guard guard(mutex_);
    --running_;
    last_request_ = base::Clock::now();
    changed_.notify_all();
  };
  try {
    pool_->run([task = std::move(task), done]() mutable {
      task();
      task = nullptr;  // what it holds goes first
      done();
    });
  } catch (const std::system_error& error) {
    done();
    base::log_warning(base::str("a request was dropped: there is no thread to serve it (", error.what(), ")"));
  }
}

std::shared_ptr<AutogradContext> Service::context_of(const ContextId& id) {
  auto& context = contexts_[id];
  if (context == nullptr) context = std::make_shared<AutogradContext>(id, job_);
  return context;
}

void Service::receive(transport::Message&& message) {
  auto request = std::make_shared<Request>(to_request(std::move(message)));
  std::shared_ptr<AutogradContext> context;
  {
    const std::lock_guard guard(mutex_);
    if (request->verb == Verb::kFind) {
      const auto& name = request->body.as<std::string>();
      if (!owned_.find(name)) {  // place() looks for those that wait after it has placed
        waiting_[name].push_back(std::move(*request));
        return;
      }
    }
    if (request->context) {
      if (lost_.contains(request->context.origin)) return;  // nobody waits for it
      context = context_of(request->context);
    }
  }
  start([this, request, context = std::move(context)] { serve(std::move(*request), context); });
}

void Service::end_served(const ContextId& id, bool origin_lost) {
  std::shared_ptr<AutogradContext> context;
  {
    const std::lock_guard guard(mutex_);
    auto found = contexts_.extract(id);
    if (!found) return;
    context = std::move(found.mapped());
  }
  // In a worker: what it holds may be objects of Python.
  start([this, context = std::move(context), origin_lost] { tell_end(context->id, context->end(origin_lost)); });
}

void Service::lose(const base::Loss& loss) {
  requests_.lose(loss);
  std::vector<ContextId> ids;
  {
    const std::lock_guard guard(mutex_);
    lost_.insert(loss.rank);
    for (const auto& [id, context] : contexts_) {
      if (id.origin == loss.rank) ids.push_back(id);
    }
    for (auto& [name, requests] : waiting_) {
      std::erase_if(requests, [&](const Request& request) { return request.asker == loss.rank; });
    }
    changed_.notify_all();
  }
  for (const auto& id : ids) end_served(id, /*origin_lost=*/true);
  start([this, rank = loss.rank] { owned_.release(rank); });
}

void Service::tell_end(const ContextId& id, const std::set<base::Rank>& ranks) {
  for (const auto to : ranks) {
    try {
      messenger_.transport().tell(to, to_message(id));
    } catch (const base::Error&) {  // a rank that is lost has forgotten it
    }
  }
}

void Service::serve(Request&& request, const std::shared_ptr<AutogradContext>& context) {
  Answer result{request.number, {}, {}};
  const Owned::MadeFor made_for(request.asker);
  devices::join_arrivals();
  try {
    if (request.verb != Verb::kFind && request.job != job_) {
      throw UsageError(base::str("a module, parameter or optimizer of another job is used: rank ", rank(),
                                 " has been started since; find or make it again"),
                       Code{"remote-other-job"});
    }
    result.body = run(request, context);
  } catch (...) {
    result.failure = failures_->describe_to_send(std::current_exception(), rank());
  }
  request.body = {};
  answer(request.asker, std::move(result));
  bool lost = false;
  {
    const std::lock_guard guard(mutex_);
    lost = lost_.contains(request.asker);
  }
  if (lost) owned_.release(request.asker);  // what this has made
}

void Service::answer(base::Rank asker, Answer answer) {
  const auto number = answer.number;
  try {
    try {
      messenger_.transport().send(asker, to_message(std::move(answer), asker));
    } catch (const UsageError&) {  // a result that cannot travel
      auto failure = failures_->describe_to_send(std::current_exception(), rank());
      messenger_.transport().send(asker, to_message(Answer{number, {}, std::move(failure)}, asker));
    }
  } catch (const base::Error&) {  // the asker is lost, or does not take it: nobody waits for it
  }
}

Value Service::run(Request& request, const std::shared_ptr<AutogradContext>& context) {
  const auto in_context = [&]() -> AutogradContext& {
    if (context == nullptr) throw base::FormatError("a request that needs a context came without one");
    return *context;
  };
  switch (request.verb) {
    case Verb::kFind:
      return to_value(owned_.find(request.body.as<std::string>()).value());
    case Verb::kCall:
      return run_call(request, context);
    case Verb::kBackward:
      return run_backward(request, in_context());
    case Verb::kOptimizer:
      return run_optimizer(request);
    case Verb::kNorm:
      return run_norm(request, in_context());
    case Verb::kStep:
      return run_step(request, in_context());
    case Verb::kShare:
      return run_share(request);
  }
  throw base::InternalError("a request of no kind");
}

Value Service::run_call(Request& request, const std::shared_ptr<AutogradContext>& context) {
  const auto placed = owned_.module(request.subject);
  auto parts = to_parts(std::move(request.body), 2);
  Value outputs, reached;
  const Turns::Turn turn(turns_, patience());
  if (context != nullptr) context->check();
  const InContext in_context(context);
  runtime::run_with_modes(parts[0].as<std::string>(), [&] {
    const at::AutoGradMode recorded(context != nullptr && at::GradMode::is_enabled());
    std::shared_ptr<remote::CalleeGraph> graph;
    if (at::GradMode::is_enabled()) graph = std::make_shared<remote::CalleeGraph>(parts[1]);
    outputs = placed->call(std::move(parts[1]));
    if (graph == nullptr) return;
    graph->set_outputs(outputs);
    if (!graph->differentiable()) return;
    reached = graph->reached();
    context->keep_graph({request.asker, request.number}, std::move(graph));
  });
  return value::Tuple{{std::move(outputs), std::move(reached)}};
}

Value Service::run_backward(Request& request, AutogradContext& context) {
  auto parts = to_parts(std::move(request.body), 4);
  remote::BackwardOptions options{.keep_graph = parts[1].as<bool>(), .watched = value::to_numbers(parts[2])};
  const auto gradients = to_tensors(parts[3]);
  const Turns::Turn turn(turns_, patience());
  const auto graph = context.graph({request.asker, parts[0].as<std::int64_t>()}, options.keep_graph);
  const auto its_patience = patience();
  const Backward backward(context, its_patience);
  remote::LeafGradients leaves;
  auto of_arguments = graph->collect(gradients, options, leaves);
  context.add(leaves);
  return to_list(of_arguments);
}

Value Service::run_optimizer(Request& request) {
  auto parts = to_parts(std::move(request.body), 3);
  auto rule = functional(parts[0].as<std::string>(), rank());
  std::vector<double> hyper;
  for (const auto& one : parts[1].as<value::List>().items) hyper.push_back(one.as<double>());
  const auto parameters = value::to_numbers(parts[2]);
  auto updater = make_functional_updater(std::move(rule), std::move(hyper), parameters.size(), threads_);
  return owned_.add_optimizer(parameters, std::move(updater));
}

Value Service::run_norm(const Request& request, AutogradContext& context) {
  const auto gradients = context.gradients(owned_.optimizer(request.subject)->tensors());
  std::vector<optim::Update> updates;
  for (const auto& gradient : gradients) {
    if (gradient.defined()) updates.push_back({.parameter = &gradient, .gradient = &gradient});
  }
  return optim::squared_gradient_norm(updates, 1, *threads_);
}

Value Service::run_step(const Request& request, AutogradContext& context) {
  const auto updated = owned_.optimizer(request.subject);
  auto parts = to_parts(Value(request.body), 2);
  StepOptions options{.hyper = std::move(parts[1])};
  if (const auto* given = parts[0].get_if<double>()) options.norm = *given;
  updated->step(context.take(updated->tensors()), options);
  return {};
}

Value Service::run_share(const Request& request) {
  const auto what = request.body.as<std::int64_t>() == static_cast<std::int64_t>(Shared::kModule) ? Shared::kModule
                                                                                                  : Shared::kOptimizer;
  owned_.share(what, request.subject);
  return {};
}

// Contexts, as the program uses them.

std::shared_ptr<AutogradContext> Service::begin_context() {
  auto& current = current_context();
  if (current != nullptr && !current->ended()) {
    throw UsageError(
        base::str("a context inside ", current->id, ": a thread is in one context at a time; end that one first"),
        Code{"remote-context-nested"});
  }
  const std::lock_guard guard(mutex_);
  if (ended_) throw UsageError("a context of a job that has ended", Code{"remote-other-job"});
  current = context_of({rank(), ++begun_});
  return current;
}

void Service::end_context(const std::shared_ptr<AutogradContext>& context) {
  if (auto& current = current_context(); current == context) current = nullptr;
  if (context->job != job_) return;  // it ended with its job
  {
    const std::lock_guard guard(mutex_);
    contexts_.erase(context->id);
  }
  auto ranks = context->end();
  ranks.erase(rank());
  tell_end(context->id, ranks);
}

std::size_t Service::contexts() {
  const std::lock_guard guard(mutex_);
  return contexts_.size();
}

bool Service::end() {
  requests_.close();
  std::map<ContextId, std::shared_ptr<AutogradContext>> contexts;
  {
    std::unique_lock lock(mutex_);
    ended_ = true;
    changed_.notify_all();
    if (!changed_.wait_for(lock, kEndOfWork, [this] { return running_ == 0; })) return false;
    contexts.swap(contexts_);
  }
  for (const auto& [id, context] : contexts) context->end();
  pool_ = nullptr;
  return true;
}

}  // namespace lamina::parameter_server
