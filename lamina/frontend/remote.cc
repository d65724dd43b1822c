// SPDX-License-Identifier: Apache-2.0
#include "lamina/frontend/remote.h"

#include "lamina/frontend/current.h"
#include "lamina/optim/registry.h"

namespace lamina {
namespace {

parameter_server::Service& service(const char* what) {
  return frontend::outside_step(what).session->parameter_server();
}

// Modules and parameters that ranks own rely on the layout that there is.
void note_placed() {
  auto& relies = frontend::current().relies;
  if (relies.empty()) relies.emplace_back("lamina.remote has placed modules or parameters");
}

base::Patience patience(const char* what, const CallSite& site) {
  return frontend::patience(*frontend::current().session, what, site);
}

}  // namespace

namespace remote {

Value RemoteModule::call(Value arguments) const {
  constexpr auto kWhat = "a call of a module that another rank owns";
  return service(kWhat).trainer().call(module_.address, module_.label(), std::move(arguments), patience(kWhat, {}));
}

Context::Context(CallSite site)
    : site_(site), service_(service("lamina::remote::Context")), context_(service_.begin_context()) {}

Context::~Context() { service_.end_context(context_); }

void Context::backward(const std::vector<at::Tensor>& tensors, const std::vector<at::Tensor>& gradients,
                       bool retain_graph) {
  constexpr auto kWhat = "lamina::remote::Context::backward()";
  service(kWhat).trainer().backward(*context_, tensors, gradients, retain_graph, patience(kWhat, site_));
}

RemoteModule find(const std::string& name, int owner, CallSite site) {
  constexpr auto kWhat = "lamina::remote::find()";
  if (owner < 0 || owner >= size()) {
    throw base::UsageError(base::str(kWhat, ": there is no rank ", owner, "; the job has ", size()));
  }
  auto found = service(kWhat).trainer().find(base::Rank(owner), name, patience(kWhat, site));
  note_placed();
  return RemoteModule(std::move(found));
}

void serve(CallSite site) {
  constexpr auto kWhat = "lamina::remote::serve()";
  service(kWhat).serve(patience(kWhat, site));
}

RemoteModule place(const std::string& name, const torch::nn::Module& module, RemoteFunction call) {
  parameter_server::Placed placed{name, std::move(call), {}};
  for (const auto& item : module.named_parameters()) placed.parameters.emplace_back(item.key(), item.value());
  auto there = service("lamina::remote::place()").place(std::move(placed));
  note_placed();
  return RemoteModule(std::move(there));
}

}  // namespace remote

namespace optim {

DistributedOptimizer::DistributedOptimizer(const std::string& name,
                                           const std::vector<remote::RemoteParameter>& parameters, Given given,
                                           CallSite site) {
  constexpr auto kWhat = "lamina::optim::DistributedOptimizer()";
  auto& there = service(kWhat).trainer();
  std::vector<parameter_server::Address> addresses;
  for (const auto& parameter : parameters) addresses.push_back(parameter.address);
  hyper_ = there.hyper_values(name, given);
  functional_ = optim::shared_registry().find(name);
  optimizer_ = there.make_optimizer(name, hyper_, addresses, patience(kWhat, site));
}

void DistributedOptimizer::set_options(const Given& given) {
  const auto& declaration = functional_->declaration();
  auto hyper = hyper_;
  for (const auto& [name, value] : given) {
    const auto index = fused::hyper_index(declaration, name);
    if (index == hyper.size()) {
      throw base::UsageError(base::str(declaration.name, " has no hyper-parameter with the name ", std::string(name)));
    }
    hyper[index] = fused::hyper_value(declaration.hyper[index], value);
  }
  functional_->check(hyper);
  hyper_ = std::move(hyper);
  value::List list;
  for (const double number : hyper_) list.items.push_back(number);
  optimizer_.hyper = std::move(list);
}

void DistributedOptimizer::step(remote::Context& context, CallSite site) {
  constexpr auto kWhat = "lamina::optim::DistributedOptimizer::step()";
  service(kWhat).trainer().step(context.part(), optimizer_, patience(kWhat, site));
}

}  // namespace optim
}  // namespace lamina
