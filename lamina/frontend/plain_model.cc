// SPDX-License-Identifier: Apache-2.0
#include "lamina/frontend/plain_model.h"

#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/nn/module.h>

#include <span>
#include <utility>

#include "lamina/base/error.h"
#include "lamina/frontend/routing.h"
#include "lamina/remote/graph.h"
#include "lamina/runtime/rng_streams.h"
#include "lamina/value/released.h"
#include "lamina/value/torch_version.h"

namespace lamina::frontend {
namespace {

namespace autograd = torch::autograd;

// A call that is recorded, in the stream of random numbers that it has in a step.
class RecordedCall : public Router::Scope {
 public:
  RecordedCall(const verification::PlainRun& run, base::ModuleId id, bool starts_rng_stream)
      : run_(run),
        id_(id),
        stream_(starts_rng_stream ? runtime::rng_stream_here() : std::optional<runtime::RngStream>()) {}
  bool wants_arguments() const override { return true; }
  void given(const value::Value& arguments) override { call_ = run_.begin(id_.value, tensors_in(arguments)); }
  bool wants_result() const override { return true; }
  void returned(const value::Value& result) override { call_->end(tensors_in(result)); }

 private:
  const verification::PlainRun& run_;
  const base::ModuleId id_;
  const std::optional<runtime::RngStream> stream_;
  std::unique_ptr<model::HookedCall> call_;
};

// Calls of modules that stay here.
class PlainRouter : public Router {
 public:
  PlainRouter(const TorchModuleTree& tree, const verification::PlainRun& run)
      : tree_(tree), run_(run), streams_(tree.starts_rng_stream()) {}

  std::optional<ModulePlace> find(const torch::nn::Module* module) override {
    const int node = tree_.node(module);
    if (node < 0) return std::nullopt;
    return ModulePlace{this, base::ModuleId(node), /*elsewhere=*/false};
  }
  value::Value call(base::ModuleId, std::int64_t, value::Value) override { return {}; }  // nothing is elsewhere
  std::unique_ptr<Scope> enter(base::ModuleId id) override {
    return std::make_unique<RecordedCall>(run_, id, streams_.at(id.value));
  }

 private:
  const TorchModuleTree& tree_;
  const verification::PlainRun& run_;
  const std::vector<bool> streams_;
};

// Gives tensors of a model other values while it lives, also those that are elsewhere, sharded or slices. They keep
// their objects. The plain graph has nodes of its own that add up gradients in them, of other shapes where layers are
// cut, and does not see that the step writes to them.
class StandIns {
 public:
  explicit StandIns(std::span<const std::pair<at::Tensor, at::Tensor>> values) {
    for (const auto& [tensor, value] : values) {
      const bool is_trained = tensor.requires_grad() && tensor.is_leaf();
      before_.push_back({tensor, tensor.variable_data(), autograd::impl::version_counter(tensor),
                         is_trained ? autograd::impl::try_get_grad_accumulator(tensor) : nullptr, is_trained});
      give(tensor, value, autograd::impl::version_counter(value));
      if (is_trained) accumulate_in(tensor, nullptr);
    }
  }
  ~StandIns() {
    for (const auto& [tensor, value, writes, accumulator, is_trained] : before_) {
      give(tensor, value, writes);
      if (is_trained) accumulate_in(tensor, accumulator);
    }
  }
  StandIns(const StandIns&) = delete;

 private:
  using Accumulator = value::NodePtr<autograd::Node>;
  struct Before {
    at::Tensor tensor, value;
    c10::VariableVersion writes;
    Accumulator accumulator;
    bool is_trained;
  };

  // `tensor.set_data()` would ask for the value that it has, and for one of the same keys.
  static void give(const at::Tensor& tensor, const at::Tensor& value, const c10::VariableVersion& writes) {
    auto* impl = tensor.unsafeGetTensorImpl();
    impl->shallow_copy_from(value.getIntrusivePtr());
    if (!impl->is_inference()) impl->set_version_counter(writes);  // others have none
  }
  static void accumulate_in(const at::Tensor& tensor, const Accumulator& node) {
    autograd::impl::set_grad_accumulator(tensor, value::NodeWeakPtr<autograd::Node>(node));
  }

  std::vector<Before> before_;
};

// Has the layers of a model compute with whole parameters while it lives.
class WholeLayers {
 public:
  explicit WholeLayers(const torch::nn::Module& root) {
    for (const auto& module : root.modules()) {
      auto* sliced = dynamic_cast<Sliced*>(module.get());
      if (sliced == nullptr) continue;
      if (const auto member = sliced->make_whole()) cut_.emplace_back(sliced, *member);
    }
  }
  ~WholeLayers() {
    for (const auto& [sliced, member] : cut_) sliced->begin(member);
  }
  WholeLayers(const WholeLayers&) = delete;

 private:
  std::vector<std::pair<Sliced*, Member>> cut_;
};

value::Value copied(value::Value arguments) {
  value::for_each_tensor(arguments, [](at::Tensor& tensor) {
    if (tensor.defined()) tensor = tensor.detach().clone().requires_grad_(tensor.requires_grad());
  });
  return arguments;
}

template <class Run>
std::string failure_of(const Run& run) {
  try {
    run();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

// Has a model called plainly while it lives, in the modes and with the random numbers of its call.
class InPlace {
 public:
  InPlace(const TorchModuleTree& tree, std::span<const std::pair<at::Tensor, at::Tensor>> values,
          const verification::PlainRun& run, const at::ThreadLocalState& modes, runtime::ProcessState& state)
      : layers_(*tree.root()),
        tensors_(values),
        router_(tree, run),
        outer_(frontend::router()),
        modes_(modes),
        state_(state) {
    state_.swap();
    set_router(&router_);
  }
  ~InPlace() {
    set_router(outer_);
    state_.swap();
  }
  InPlace(const InPlace&) = delete;

  PlainRouter& router() { return router_; }

 private:
  const WholeLayers layers_;
  const StandIns tensors_;
  PlainRouter router_;
  Router* const outer_;
  const at::ThreadLocalStateGuard modes_;
  const runtime::AsInBody streams_;
  runtime::ProcessState& state_;
};

}  // namespace

TorchPlainModel::TorchPlainModel(const TorchModuleTree& tree, Example call)
    : tree_(tree), call_(std::move(call)), state_(runtime::ProcessState::current()) {}

std::string TorchPlainModel::run_forward(const std::shared_ptr<verification::PlainRun>& run,
                                         const std::optional<session::PlainValues>& values) {
  run_ = run;
  return failure_of([&] {
    take_values(values);
    run_->watch({});
    InPlace in_place(tree_, values_, *run_, modes_, state_);
    auto arguments = copied(call_.arguments);
    const auto scope = in_place.router().enter(base::ModuleId(0));
    scope->given(arguments);
    const auto output = call_kind(call_.kind)(*tree_.root(), std::move(arguments));
    scope->returned(output);
    returned_ = tensors_in(output);
  });
}

void TorchPlainModel::take_values(const std::optional<session::PlainValues>& values) {
  for (const auto& held : tree_.tensors()) {
    auto value = held.tensor;
    if (values) {
      if (const auto given = values->tensors.find(held.name); given != values->tensors.end()) value = given->second;
    }
    if (value::is_released(value)) throw base::UsageError(held.name + " has no value here");
    values_.emplace_back(held.tensor, value.detach().clone());  // the memory goes with the cut
  }
}

std::string TorchPlainModel::run_backward(const std::map<std::int64_t, at::Tensor>& gradients) {
  return failure_of([&] {
    remote::Tensors outputs, given;
    for (const auto& [number, gradient] : gradients) {
      const auto& output = returned_.at(static_cast<std::size_t>(number));
      if (!output.requires_grad()) continue;
      outputs.push_back(output);
      given.push_back(gradient);
    }
    const InPlace in_place(tree_, values_, *run_, modes_, state_);
    const auto found =
        outputs.empty() ? remote::LeafGradients() : remote::collect_backward(outputs, given, /*keep_graph=*/false);
    std::map<const void*, at::Tensor> by_leaf;
    for (std::size_t i = 0; i < found.leaves.size(); ++i) {
      by_leaf[found.leaves[i].unsafeGetTensorImpl()] = found.gradients[i];
    }
    std::vector<verification::ParameterGradients::Named> named;
    for (const auto& [name, tensor, node, shape] : tree_.parameters()) {
      if (!tensor.requires_grad() || !tensor.is_leaf()) continue;
      const auto& gradient = by_leaf[tensor.unsafeGetTensorImpl()];
      named.emplace_back(name, gradient.defined() ? gradient : at::zeros(tensor.sizes(), tensor.options()));
    }
    run_->see_gradients(named);
  });
}

}  // namespace lamina::frontend
