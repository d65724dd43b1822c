// SPDX-License-Identifier: Apache-2.0
// States of a request here: received, (a call or a backward: waits for its turn,) runs, answered. A find may wait for
// what it asks for; it has no thread meanwhile.
//
// Threads: receive(), end_served() and lose() run in the transport's thread, which hands over to workers; a context
// gets its part here in that thread, so that its end, which comes later, finds it. Those that call, step or place are
// the program's, or workers that run modules of the face.
//
// Locks: a turn (turns.h) is held while a module runs, and paused while that waits for another rank; then a context's,
// under which a request is sent, which loopback receives at once, so mutex_ after it; or those of parameters. Nobody
// takes a turn, or waits for another rank, with one of them.
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
#include "lamina/optim/registry.h"
#include "lamina/optim/step.h"
#include "lamina/runtime/modes.h"

namespace lamina::parameter_server {
namespace {

using base::Code;
using base::UsageError;
using value::Value;

constexpr auto kEndOfWork = std::chrono::seconds(30);  // for threads in the user's code, when the job ends

// A backward that a thread runs, and how long its calls may take.
struct Backward {
  const Context& context;
  const base::Patience& patience;
};

// The context that this thread is in, as a trainer or as it serves; and its backward.
thread_local std::shared_ptr<Context> current_context;
thread_local const Backward* current_backward = nullptr;
thread_local std::optional<base::Rank> current_asker;  // whose request this thread serves

// A variable of this thread has another value while it lives.
template <class T>
class Set {
 public:
  Set(T& variable, T value) : variable_(variable), before_(std::exchange(variable, std::move(value))) {}
  ~Set() { variable_ = std::move(before_); }
  Set(const Set&) = delete;

 private:
  T& variable_;
  T before_;
};

constexpr const char* kModule = "module";  // that is shared
constexpr const char* kOptimizer = "optimizer";

std::int64_t random_number() {
  std::random_device random;
  return static_cast<std::int64_t>(((std::uint64_t{random()} << 32) | random()) >> 1);
}

void require_no_grad(Value& outputs) {
  value::for_each_tensor(outputs, [](at::Tensor& tensor) {
    if (tensor.defined() && tensor.requires_grad()) tensor.set_requires_grad(false);
  });
}

UsageError no_such(const char* what, std::int64_t number, base::Rank rank) {
  return UsageError(base::str("rank ", rank, " has no ", what, " ", number), Code{"remote-other-job"});
}

}  // namespace

Service::Service(Options options, messaging::Messenger& messenger)
    : options_(std::move(options)),
      failures_(options_.failures ? options_.failures : std::make_shared<value::Failures>()),
      messenger_(messenger),
      job_(random_number()),
      threads_(std::make_shared<optim::Threads>(at::get_num_threads())),
      requests_(messenger),
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

// The owner's side, as its program uses it.

RemoteModule Service::place(Placed placed) {
  RemoteModule module{{rank(), job_, 0}, placed.name, {}};
  std::vector<Request> waiting;
  {
    const std::lock_guard guard(mutex_);
    if (names_.contains(placed.name)) {
      throw UsageError(base::str("place() of a second module by the name \"", placed.name, "\" on rank ", rank(),
                                 ": choose another name"));
    }
    for (const auto& [name, tensor] : placed.parameters) {
      if (!tensor.defined() || !tensor.is_leaf()) {
        throw UsageError(base::str("place() of ", placed.name.empty() ? "a module" : placed.name, ": its parameter \"",
                                   name, "\" is the result of an operation, which nobody can update"));
      }
      auto parameter = parameters_of_.of(tensor);
      auto [known, added] = parameter_numbers_.emplace(parameter.get(), static_cast<std::int64_t>(parameters_.size()));
      if (added) parameters_.push_back(std::move(parameter));
      module.parameters.push_back(
          {{rank(), job_, known->second}, name, tensor.sizes().vec(), tensor.scalar_type(), tensor.requires_grad()});
    }
    module.address.number = static_cast<std::int64_t>(placed_.size());
    PlacedHere here;
    if (placed.name.empty()) here.maker = current_asker;
    for (const auto& parameter : module.parameters) here.parameters.push_back(parameter.address.number);
    if (!placed.name.empty()) {
      names_[placed.name] = module;
      if (auto found = waiting_.extract(placed.name)) waiting = std::move(found.mapped());
    }
    here.what = std::make_shared<const Placed>(std::move(placed));
    placed_.push_back(std::move(here));
  }
  for (const auto& request : waiting) answer(request.asker, {request.number, to_value(module), {}});
  return module;
}

std::shared_ptr<Parameter> Service::parameter(std::int64_t number) {
  const std::lock_guard guard(mutex_);
  if (!std::cmp_less(number, parameters_.size()) || number < 0 || parameters_[number] == nullptr) {
    throw no_such("parameter", number, rank());
  }
  return parameters_[number];
}

std::int64_t Service::add_optimizer(const std::vector<std::int64_t>& parameters, std::shared_ptr<Updater> updater) {
  std::vector<std::shared_ptr<Parameter>> mine;
  for (const auto number : parameters) mine.push_back(parameter(number));
  auto optimizer = std::make_shared<Optimizer>(std::move(mine), std::move(updater));
  const std::lock_guard guard(mutex_);
  optimizers_.push_back({std::move(optimizer), current_asker});
  return static_cast<std::int64_t>(optimizers_.size()) - 1;
}

std::shared_ptr<Optimizer> Service::optimizer(std::int64_t number) {
  const std::lock_guard guard(mutex_);
  if (!std::cmp_less(number, optimizers_.size()) || number < 0 || optimizers_[number].what == nullptr) {
    throw no_such("optimizer", number, rank());
  }
  return optimizers_[number].what;
}

// In a worker: what goes may be objects of Python.
void Service::release(base::Rank maker) {
  std::vector<PlacedHere> modules;
  std::vector<std::shared_ptr<Optimizer>> optimizers;
  std::vector<std::shared_ptr<Parameter>> parameters;
  const std::lock_guard guard(mutex_);
  for (auto& one : optimizers_) {
    if (one.maker == maker) optimizers.push_back(std::exchange(one.what, nullptr));
  }
  for (auto& one : placed_) {
    if (one.maker == maker) modules.push_back(std::exchange(one, {}));
  }
  std::set<std::int64_t> used;
  for (const auto& one : placed_) used.insert(one.parameters.begin(), one.parameters.end());
  for (const auto& module : modules) {
    for (const auto number : module.parameters) {
      if (used.contains(number) || parameters_[number] == nullptr) continue;
      parameter_numbers_.erase(parameters_[number].get());
      parameters.push_back(std::exchange(parameters_[number], nullptr));
    }
  }
}

void Service::serve(const base::Patience& patience) {
  const auto others = static_cast<std::size_t>(messenger_.transport().size()) - 1;
  std::unique_lock lock(mutex_);
  last_request_ = base::Deadline::Clock::now();
  while (lost_.size() < others && !ended_) {
    changed_.wait_for(lock, base::kInterruptSlice);
    if (running_ == 0 && base::Deadline::Clock::now() - last_request_ > patience.timeout) {
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
    last_request_ = base::Deadline::Clock::now();
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

std::shared_ptr<Context> Service::context_of(const ContextId& id) {
  auto& context = contexts_[id];
  if (context == nullptr) context = std::make_shared<Context>(id, job_);
  return context;
}

void Service::receive(transport::Message&& message) {
  auto request = std::make_shared<Request>(to_request(std::move(message)));
  std::shared_ptr<Context> context;
  {
    const std::lock_guard guard(mutex_);
    if (request->verb == Verb::kFind) {
      const auto& name = request->body.as<std::string>();
      if (!names_.contains(name)) {
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
  std::shared_ptr<Context> context;
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
  start([this, rank = loss.rank] { release(rank); });
}

void Service::tell_end(const ContextId& id, const std::set<base::Rank>& ranks) {
  for (const auto to : ranks) {
    try {
      messenger_.transport().tell(to, to_message(id));
    } catch (const base::Error&) {  // a rank that is lost has forgotten it
    }
  }
}

void Service::serve(Request&& request, const std::shared_ptr<Context>& context) {
  Answer result{request.number, {}, {}};
  const Set asked_by(current_asker, std::optional(request.asker));
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
  if (lost) release(request.asker);  // what this has made
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

Value Service::run(Request& request, const std::shared_ptr<Context>& context) {
  const auto in_context = [&]() -> Context& {
    if (context == nullptr) throw base::FormatError("a request that needs a context came without one");
    return *context;
  };
  switch (request.verb) {
    case Verb::kFind: {
      const std::lock_guard guard(mutex_);
      return to_value(names_.at(request.body.as<std::string>()));
    }
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

Value Service::run_call(Request& request, const std::shared_ptr<Context>& context) {
  std::shared_ptr<const Placed> placed;
  {
    const std::lock_guard guard(mutex_);
    if (std::cmp_less(request.subject, placed_.size()) && request.subject >= 0) placed = placed_[request.subject].what;
    if (placed == nullptr) throw no_such("module", request.subject, rank());
  }
  auto parts = to_parts(std::move(request.body), 2);
  Value outputs, reached;
  const Turns::Turn turn(turns_, patience());
  if (context != nullptr) context->check();
  const Set in_context(current_context, context);
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

Value Service::run_backward(Request& request, Context& context) {
  auto parts = to_parts(std::move(request.body), 4);
  remote::BackwardOptions options{.keep_graph = parts[1].as<bool>(), .watched = to_numbers(parts[2])};
  const auto gradients = to_tensors(parts[3]);
  const Turns::Turn turn(turns_, patience());
  const auto graph = context.graph({request.asker, parts[0].as<std::int64_t>()}, options.keep_graph);
  const auto its_patience = patience();
  const Backward backward{context, its_patience};
  const Set in_backward(current_backward, static_cast<const Backward*>(&backward));
  remote::LeafGradients leaves;
  auto of_arguments = graph->collect(gradients, options, leaves);
  context.add(leaves);
  return to_list(of_arguments);
}

Value Service::run_optimizer(Request& request) {
  auto parts = to_parts(std::move(request.body), 3);
  auto rule = functional(parts[0].as<std::string>());
  std::vector<double> hyper;
  for (const auto& one : parts[1].as<value::List>().items) hyper.push_back(one.as<double>());
  const auto parameters = to_numbers(parts[2]);
  auto updater = make_functional_updater(std::move(rule), std::move(hyper), parameters.size(), threads_);
  return add_optimizer(parameters, std::move(updater));
}

Value Service::run_norm(const Request& request, Context& context) {
  const auto gradients = context.gradients(optimizer(request.subject)->tensors());
  std::vector<optim::Update> updates;
  for (const auto& gradient : gradients) {
    if (gradient.defined()) updates.push_back({.parameter = &gradient, .gradient = &gradient});
  }
  return optim::squared_gradient_norm(updates, 1, *threads_);
}

Value Service::run_step(const Request& request, Context& context) {
  const auto updated = optimizer(request.subject);
  auto parts = to_parts(Value(request.body), 2);
  StepOptions options{.hyper = std::move(parts[1])};
  if (const auto* given = parts[0].get_if<double>()) options.norm = *given;
  updated->step(context.take(updated->tensors()), options);
  return {};
}

Value Service::run_share(const Request& request) {
  const auto& what = request.body.as<std::string>();
  const std::lock_guard guard(mutex_);
  if (what == kModule && request.subject >= 0 && std::cmp_less(request.subject, placed_.size())) {
    placed_[request.subject].maker = std::nullopt;
  } else if (what == kOptimizer && request.subject >= 0 && std::cmp_less(request.subject, optimizers_.size())) {
    optimizers_[request.subject].maker = std::nullopt;
  } else {
    throw no_such(what == kModule ? kModule : kOptimizer, request.subject, rank());
  }
  return {};
}

// The trainer's side.

RemoteModule Service::find(base::Rank owner, const std::string& name, const base::Patience& patience) {
  if (name.empty()) throw UsageError("find() of a module without a name: give the one that its owner placed it by");
  const auto asked = requests_.ask(owner, {.verb = Verb::kFind, .body = name},
                                   base::str("find() of \"", name, "\" on rank ", owner), nullptr);
  return to_remote_module(requests_.await(asked, patience));
}

void Service::check_context(const Context& context) const {
  if (context.job == job_) return;
  throw UsageError(base::str(context.id, " is of another job: this one has begun since; begin a context in it"),
                   Code{"remote-other-job"});
}

Value Service::call(const Address& module, const std::string& label, Value arguments, const base::Patience& patience) {
  const auto context = current_context;
  if (context != nullptr) check_context(*context);
  const auto where =
      base::str(label, " on rank ", module.owner, context == nullptr ? std::string() : base::str(" in ", context->id));
  const auto number = std::make_shared<std::int64_t>(0);
  std::optional<remote::CallerGraph> graph;
  if (context != nullptr && at::GradMode::is_enabled()) {
    const auto run = [this, context, module, where, number](const remote::Tensors& gradients,
                                                            const remote::BackwardOptions& options,
                                                            const remote::GradientTargets&) {
      return call_backward(context, module, "backward of " + where, *number, gradients, options);
    };
    graph.emplace(arguments, label, module.owner, run, remote::CallerGraph::Part::kAlways);
  }
  Request request{.verb = Verb::kCall, .job = module.job, .subject = module.number};
  request.body = value::Tuple{{runtime::capture_modes(), std::move(arguments)}};
  const auto asked = requests_.ask(module.owner, std::move(request), "call of " + where, context.get());
  *number = Requests::number(asked);
  auto parts = to_parts(requests_.await(asked, patience), 2);
  const auto* reached = parts[1].get_if<std::string>();
  if (graph && reached != nullptr) {
    graph->attach(parts[0], *reached);
  } else {
    require_no_grad(parts[0]);
  }
  return std::move(parts[0]);
}

Tensors Service::call_backward(const std::shared_ptr<Context>& context, const Address& module, const std::string& what,
                               std::int64_t call, const Tensors& gradients, const remote::BackwardOptions& options) {
  context->check();
  if (current_backward == nullptr || &current_backward->context != context.get()) {
    throw UsageError(base::str(what, ": a backward that is not ", context->id,
                               "'s reached it; call lamina.remote.backward(context, [loss]) in place of "
                               "loss.backward(): the gradients are the context's, not .grad"),
                     Code{"remote-backward"});
  }
  Request request{.verb = Verb::kBackward, .job = module.job};
  request.body = value::Tuple{{call, options.keep_graph, to_list(options.watched), to_list(gradients)}};
  const auto asked = requests_.ask(module.owner, std::move(request), what, context.get());
  return to_tensors(requests_.await(asked, current_backward->patience));
}

std::shared_ptr<const optim::Functional> Service::functional(const std::string& name) const {
  auto found = optim::shared_registry().find(name);
  if (found == nullptr)
    throw UsageError(base::str("rank ", rank(), " has no functional optimizer \"", name,
                               "\": where it is a shared library's, register it on every rank"));
  return found;
}

std::vector<double> Service::hyper_values(const std::string& functional,
                                          std::span<const std::pair<std::string_view, fused::HyperValue>> given) const {
  return fused::hyper_values(this->functional(functional)->declaration(), given);
}

RemoteOptimizer Service::make_optimizer(const std::string& functional, const std::vector<double>& hyper,
                                        const std::vector<Address>& parameters, const base::Patience& patience) {
  const auto rule = this->functional(functional);
  rule->check(hyper);
  std::map<Address, std::vector<std::int64_t>> owners;  // with the number 0
  for (const auto& parameter : parameters) owners[{parameter.owner, parameter.job, 0}].push_back(parameter.number);
  value::List values;
  for (const double value : hyper) values.items.push_back(value);
  std::vector<std::pair<Address, Requests::Asked>> asked;
  for (const auto& [owner, numbers] : owners) {
    Request request{.verb = Verb::kOptimizer, .job = owner.job};
    request.body = value::Tuple{{functional, values, to_list(numbers)}};
    const auto what = base::str("making ", functional, " of ", numbers.size(), " parameters of rank ", owner.owner);
    asked.emplace_back(owner, requests_.ask(owner.owner, std::move(request), what, nullptr));
  }
  RemoteOptimizer optimizer{{}, rule->declaration().gradient_norm};
  auto shared = patience;
  shared.by = base::Deadline::after(patience.timeout);
  for (auto& [owner, one] : asked) {
    optimizer.parts.push_back({owner.owner, owner.job, requests_.await(one, shared).as<std::int64_t>()});
  }
  return optimizer;
}

void Service::share(Shared what, const Address& address, const base::Patience& patience) {
  Request request{.verb = Verb::kShare, .job = address.job, .subject = address.number};
  request.body = what == Shared::kModule ? kModule : kOptimizer;
  const auto asked = requests_.ask(address.owner, std::move(request),
                                   base::str("sharing what rank ", address.owner, " has made"), nullptr);
  requests_.await(asked, patience);
}

std::shared_ptr<Context> Service::begin_context() {
  if (current_context != nullptr && !current_context->ended()) {
    throw UsageError(base::str("a context inside ", current_context->id,
                               ": a thread is in one context at a time; end that one first"),
                     Code{"remote-context-nested"});
  }
  const std::lock_guard guard(mutex_);
  if (ended_) throw UsageError("a context of a job that has ended", Code{"remote-other-job"});
  current_context = context_of({rank(), ++begun_});
  return current_context;
}

void Service::end_context(const std::shared_ptr<Context>& context) {
  if (current_context == context) current_context = nullptr;
  if (context->job != job_) return;  // it ended with its job
  {
    const std::lock_guard guard(mutex_);
    contexts_.erase(context->id);
  }
  auto ranks = context->end();
  ranks.erase(rank());
  tell_end(context->id, ranks);
}

void Service::backward(Context& context, const Tensors& tensors, const Tensors& gradients, bool keep_graph,
                       const base::Patience& patience) {
  check_context(context);
  if (tensors.empty()) throw UsageError("backward() of no tensors: give the losses");
  context.begin_backward();
  const Backward backward{context, patience};
  const Set in_backward(current_backward, static_cast<const Backward*>(&backward));
  context.add(remote::collect_backward(tensors, gradients, keep_graph));
}

std::vector<Value> Service::ask_parts(Context& context, const RemoteOptimizer& optimizer, Verb verb, const Value& body,
                                      const base::Patience& patience) {
  const char* what = verb == Verb::kStep ? "update of parameters on rank " : "norm of gradients on rank ";
  std::vector<Requests::Asked> asked;
  for (const auto& part : optimizer.parts) {
    Request request{.verb = verb, .job = part.job, .subject = part.number, .body = body};
    asked.push_back(
        requests_.ask(part.owner, std::move(request), base::str(what, part.owner, " in ", context.id), &context));
  }
  std::vector<Value> answers;
  std::exception_ptr first;
  auto shared = patience;
  shared.by = base::Deadline::after(patience.timeout);
  for (const auto& one : asked) {  // all of them: nothing goes on there when this returns
    try {
      answers.push_back(requests_.await(one, shared));
    } catch (...) {
      if (!first) first = std::current_exception();
    }
  }
  if (first) std::rethrow_exception(first);
  return answers;
}

void Service::step(Context& context, const RemoteOptimizer& optimizer, const base::Patience& patience) {
  check_context(context);
  if (optimizer.parts.empty()) return;
  context.begin_step(optimizer.parts.front());
  Value norm;
  if (optimizer.needs_norm && optimizer.parts.size() > 1) {
    double squares = 0;
    for (const auto& part : ask_parts(context, optimizer, Verb::kNorm, {}, patience)) squares += part.as<double>();
    norm = std::sqrt(squares);
  }
  ask_parts(context, optimizer, Verb::kStep, value::Tuple{{std::move(norm), optimizer.hyper}}, patience);
}

std::size_t Service::contexts() {
  const std::lock_guard guard(mutex_);
  return contexts_.size();
}

std::size_t Service::modules() {
  const std::lock_guard guard(mutex_);
  return std::ranges::count_if(placed_, [](const auto& one) { return one.what != nullptr; });
}

std::size_t Service::optimizers() {
  const std::lock_guard guard(mutex_);
  return std::ranges::count_if(optimizers_, [](const auto& one) { return one.what != nullptr; });
}

bool Service::end() {
  requests_.close();
  std::map<ContextId, std::shared_ptr<Context>> contexts;
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
