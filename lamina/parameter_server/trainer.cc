// SPDX-License-Identifier: Apache-2.0
#include "lamina/parameter_server/trainer.h"

#include <c10/core/GradMode.h>

#include <cmath>
#include <exception>
#include <map>
#include <optional>

#include "lamina/base/str.h"
#include "lamina/faces/sayings.h"
#include "lamina/optim/registry.h"
#include "lamina/runtime/modes.h"
#include "lamina/value/numbers.h"

namespace lamina::parameter_server {
namespace {

using base::Code;
using base::UsageError;
using value::Value;

void require_no_grad(Value& outputs) {
  value::for_each_tensor(outputs, [](at::Tensor& tensor) {
    if (tensor.defined() && tensor.requires_grad()) tensor.set_requires_grad(false);
  });
}

}  // namespace

RemoteModule Trainer::find(base::Rank owner, const std::string& name, const base::Patience& patience) {
  if (name.empty()) throw UsageError("find() of a module without a name: give the one that its owner placed it by");
  const auto asked = requests_.ask(owner, {.verb = Verb::kFind, .body = name},
                                   base::str("find() of \"", name, "\" on rank ", owner), nullptr);
  return to_remote_module(requests_.await(asked, patience));
}

void Trainer::check_context(const AutogradContext& context) const {
  if (context.job == job_) return;
  throw faces::refusal("other-job", context.id);
}

Value Trainer::call(const Address& module, const std::string& label, Value arguments, const base::Patience& patience) {
  const auto context = current_context();
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

std::vector<at::Tensor> Trainer::call_backward(const std::shared_ptr<AutogradContext>& context, const Address& module,
                                               const std::string& what, std::int64_t call,
                                               const std::vector<at::Tensor>& gradients,
                                               const remote::BackwardOptions& options) {
  context->check();
  const auto* backward = Backward::current();
  if (backward == nullptr || &backward->context != context.get()) {
    throw UsageError(base::str(what, ": a backward that is not ", context->id,
                               "'s reached it; call lamina.remote.backward(context, [loss]) in place of "
                               "loss.backward(): the gradients are the context's, not .grad"),
                     Code{"remote-backward"});
  }
  Request request{.verb = Verb::kBackward, .job = module.job};
  request.body = value::Tuple{{call, options.keep_graph, value::to_list(options.watched), to_list(gradients)}};
  const auto asked = requests_.ask(module.owner, std::move(request), what, context.get());
  return to_tensors(requests_.await(asked, backward->patience));
}

std::shared_ptr<const optim::Functional> functional(const std::string& name, base::Rank rank) {
  auto found = optim::shared_registry().find(name);
  if (found == nullptr)
    throw UsageError(base::str("rank ", rank, " has no functional optimizer \"", name,
                               "\": where it is a shared library's, register it on every rank"));
  return found;
}

std::vector<double> Trainer::hyper_values(const std::string& functional,
                                          std::span<const std::pair<std::string_view, fused::HyperValue>> given) const {
  return fused::hyper_values(parameter_server::functional(functional, rank_)->declaration(), given);
}

RemoteOptimizer Trainer::make_optimizer(const std::string& functional, const std::vector<double>& hyper,
                                        const std::vector<Address>& parameters, const base::Patience& patience) {
  const auto rule = parameter_server::functional(functional, rank_);
  rule->check(hyper);
  std::map<Address, std::vector<std::int64_t>> owners;  // with the number 0
  for (const auto& parameter : parameters) owners[{parameter.owner, parameter.job, 0}].push_back(parameter.number);
  value::List values;
  for (const double value : hyper) values.items.push_back(value);
  std::vector<std::pair<Address, Requests::Asked>> asked;
  for (const auto& [owner, numbers] : owners) {
    Request request{.verb = Verb::kOptimizer, .job = owner.job};
    request.body = value::Tuple{{functional, values, value::to_list(numbers)}};
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

void Trainer::share(Shared what, const Address& address, const base::Patience& patience) {
  Request request{.verb = Verb::kShare, .job = address.job, .subject = address.number};
  request.body = static_cast<std::int64_t>(what);
  const auto asked = requests_.ask(address.owner, std::move(request),
                                   base::str("sharing what rank ", address.owner, " has made"), nullptr);
  requests_.await(asked, patience);
}

void Trainer::backward(AutogradContext& context, const std::vector<at::Tensor>& tensors,
                       const std::vector<at::Tensor>& gradients, bool keep_graph, const base::Patience& patience) {
  check_context(context);
  if (tensors.empty()) throw UsageError("backward() of no tensors: give the losses");
  context.begin_backward();
  const Backward backward(context, patience);
  context.add(remote::collect_backward(tensors, gradients, keep_graph));
}

std::vector<Value> Trainer::ask_parts(AutogradContext& context, const RemoteOptimizer& optimizer, Verb verb,
                                      const Value& body, const base::Patience& patience) {
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

void Trainer::step(AutogradContext& context, const RemoteOptimizer& optimizer, const base::Patience& patience) {
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

}  // namespace lamina::parameter_server
