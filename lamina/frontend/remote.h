// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/nn/module.h>

#include <memory>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "lamina/frontend/job.h"
#include "lamina/frontend/serializer.h"
#include "lamina/fused/declaration.h"
#include "lamina/parameter_server/service.h"

// Modules that one rank owns and others call and train: docs/remote.md.
//
//     if (lamina::rank() == 0) {
//       lamina::remote::place<torch::Tensor>("net", net);
//       lamina::remote::serve();
//     } else {
//       const auto net = lamina::remote::find("net", /*owner=*/0);
//       lamina::optim::DistributedOptimizer adamw("AdamW", net.parameters(), {{"lr", 1e-3}});
//       for (...) {
//         lamina::remote::Context context;
//         context.backward(loss_of(net(x), y));
//         adamw.step(context);
//       }
//     }
//
// Errors are those of lamina/parameter_server/service.h.
namespace lamina::remote {

using parameter_server::RemoteParameter;

// A module that runs on its owner, whoever calls it. May be copied; ends with the job.
class RemoteModule {
 public:
  explicit RemoteModule(parameter_server::RemoteModule module) : module_(std::move(module)) {}

  // Runs its forward there and waits for the result, which has a history in a Context.
  template <class Result = at::Tensor, class... Args>
  Result operator()(const Args&... args) const {
    return from_value<Result>(call(value::Tuple{{lamina::to_value(args)...}}));
  }

  const std::vector<RemoteParameter>& parameters() const { return module_.parameters; }

 private:
  Value call(Value arguments) const;

  parameter_server::RemoteModule module_;
};

// One iteration: begins in this thread here, and ends with its block. See [Note: contexts].
class Context {
 public:
  explicit Context(CallSite site = CallSite::current());
  ~Context();
  Context(const Context&) = delete;

  // The gradients of all leaves behind `tensors`, on whatever rank, become the context's; `.grad()` stays as it is.
  // Tensors that are no scalars need `gradients`.
  void backward(const std::vector<at::Tensor>& tensors, const std::vector<at::Tensor>& gradients = {},
                bool retain_graph = false);
  void backward(const at::Tensor& loss) { backward(std::vector{loss}); }

  parameter_server::AutogradContext& part() { return *context_; }

 private:
  const CallSite site_;
  parameter_server::Service& service_;
  const std::shared_ptr<parameter_server::AutogradContext> context_;
};

RemoteModule find(const std::string& name, int owner, CallSite site = CallSite::current());

// Waits until every other rank has left the job or is lost.
void serve(CallSite site = CallSite::current());

// The calls of a module as the engine makes them.
using RemoteFunction = std::function<Value(Value arguments)>;
RemoteModule place(const std::string& name, const torch::nn::Module& module, RemoteFunction call);

// Has this rank own a module (or what TORCH_MODULE makes) whose forward takes `Args`; others find it by its name.
template <class... Args, class Module>
RemoteModule place(const std::string& name, const Module& module) {
  const auto impl = [&] {
    if constexpr (requires { module.ptr(); }) {
      return module.ptr();
    } else {
      return module;  // a std::shared_ptr
    }
  }();
  return place(name, *impl, [impl](Value arguments) {
    auto held = from_value<std::tuple<Args...>>(arguments);
    arguments = {};  // the module alone holds them now
    return std::apply([&](auto&... item) { return lamina::to_value(impl->forward(item...)); }, held);
  });
}

}  // namespace lamina::remote

namespace lamina::optim {

// An optimizer over remote parameters: each rank updates those that it owns, in parallel. Has states of its own.
class DistributedOptimizer {
 public:
  using Given = std::vector<std::pair<std::string_view, fused::HyperValue>>;

  // `name` is that of a functional optimizer of lamina/optim/registry.h: "AdamW". Hyper-parameters that are not given
  // have torch's defaults.
  DistributedOptimizer(const std::string& name, const std::vector<remote::RemoteParameter>& parameters, Given given,
                       CallSite site = CallSite::current());

  // Hyper-parameters for the next steps of this object, as a schedule sets them: {{"lr", 1e-4}}. Throws
  // base::UsageError for what the optimizer does not take.
  void set_options(const Given& given);

  // Updates every parameter that has a gradient in the context, once; returns when all owners have.
  void step(remote::Context& context, CallSite site = CallSite::current());

 private:
  std::shared_ptr<const Functional> functional_;
  std::vector<double> hyper_;
  parameter_server::RemoteOptimizer optimizer_;
};

}  // namespace lamina::optim
