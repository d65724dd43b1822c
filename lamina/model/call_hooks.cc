// SPDX-License-Identifier: Apache-2.0
#include "lamina/model/call_hooks.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <iterator>

#include "lamina/base/error.h"
#include "lamina/base/log.h"
#include "lamina/base/str.h"
#include "lamina/value/reference_tensor.h"
#include "lamina/value/torch_version.h"

namespace lamina::model {

namespace autograd = torch::autograd;

namespace {

using Method = void (CallHook::*)(const ModuleCall&);

// Calls `after` of each, the last one first; throws the first error once all were called.
void end_all(std::span<const std::shared_ptr<CallHook>> hooks, const ModuleCall& call, Method after) {
  std::exception_ptr error;
  for (auto hook = hooks.rbegin(); hook != hooks.rend(); ++hook) {
    try {
      ((**hook).*after)(call);
    } catch (...) {
      if (!error) error = std::current_exception();
    }
  }
  if (error) std::rethrow_exception(error);
}

// For ends of what has failed, whose error counts.
void end_quietly(const ModuleCall& call, const std::function<void()>& end) {
  try {
    end();
  } catch (const std::exception& error) {
    base::log_warning(base::str("a hook after a call of ", call.name, ", which failed: ", error.what()));
  }
}

// Calls `before` of each; where one throws, `after` of those that have begun.
void begin_all(const Hooks& hooks, const ModuleCall& call, Method before, Method after) {
  for (std::size_t i = 0; i < hooks.size(); ++i) {
    try {
      ((*hooks[i]).*before)(call);
    } catch (...) {
      end_quietly(call, [&] { end_all(std::span(hooks).first(i), call, after); });
      throw;
    }
  }
}

}  // namespace

// [Note: hooked backwards] The graph of a call lies between nodes of two kinds. An Exit for each output is made after
// all other nodes of the call, and one Entry before them. The Exits lead to the Entry with gradients that do not exist.
// A backward takes of the nodes that are ready the one made last: so it comes to the Entry when all of the call's nodes
// have run, whether or not a gradient leaves the call.
class HookedCall::Backward : public std::enable_shared_from_this<Backward> {
 public:
  Backward(Hooks hooks, ModuleCall call) : hooks_(std::move(hooks)), call_(std::move(call)) {}
  ~Backward() {
    end_quietly(call_, [this] { end(); });
  }

  void begin_forward(std::span<const at::Tensor> inputs) {
    begin_all(hooks_, call_, &CallHook::before_forward, &CallHook::after_forward);
    for (const auto& hook : hooks_) hook->see_inputs(call_, inputs);
    entry_ = value::make_node<Entry>(shared_from_this());
  }
  void show(std::span<const at::Tensor> outputs) {
    for (const auto& hook : hooks_) hook->see_outputs(call_, outputs);
  }
  void end_forward() { end_all(hooks_, call_, &CallHook::after_forward); }
  const ModuleCall& call() const { return call_; }

  void watch(std::span<const at::Tensor> outputs);

 private:
  struct Entry : autograd::Node {
    explicit Entry(std::weak_ptr<Backward> of) : backward(std::move(of)) {}
    std::string name() const override { return "LaminaCallEntry"; }
    autograd::variable_list apply(autograd::variable_list&&) override {
      value::for_user([this] {
        if (const auto found = backward.lock()) found->end();
      });
      return {};
    }
    const std::weak_ptr<Backward> backward;
  };
  struct Exit : autograd::Node {
    Exit(std::shared_ptr<Backward> of, std::int64_t number) : backward(std::move(of)), output(number) {}
    std::string name() const override { return "LaminaCallExit"; }
    autograd::variable_list apply(autograd::variable_list&& gradients) override {
      value::for_user([&] {
        backward->begin();
        if (output >= 0) backward->show_gradient(output, gradients.at(0));
      });
      return {std::move(gradients.at(0)), at::Tensor()};
    }
    const std::shared_ptr<Backward> backward;
    const std::int64_t output;  // -1: of what an output is a view of
  };

  void show_gradient(std::int64_t output, const at::Tensor& gradient) {
    for (const auto& hook : hooks_) hook->see_gradient(call_, output, gradient);
  }
  bool made_here(const at::Tensor& tensor) const {
    return tensor.grad_fn() && tensor.grad_fn()->sequence_nr() > entry_->sequence_nr();
  }
  void lead_out(const at::Tensor& tensor, std::int64_t output);
  void begin();
  void end();

  const Hooks hooks_;
  const ModuleCall call_;
  value::NodePtr<Entry> entry_;
  bool open_ = false;
};

void HookedCall::Backward::watch(std::span<const at::Tensor> outputs) {
  std::vector<const void*> seen;
  const auto lead = [&](const at::Tensor& tensor, std::int64_t output) {
    if (!tensor.defined() || !tensor.requires_grad() || !made_here(tensor)) return;
    if (std::ranges::find(seen, tensor.unsafeGetTensorImpl()) != seen.end()) return;
    seen.push_back(tensor.unsafeGetTensorImpl());
    lead_out(tensor, output);
  };
  for (std::int64_t output = 0; std::cmp_less(output, outputs.size()); ++output) {
    const at::Tensor& tensor = outputs[output];
    if (!tensor.defined()) continue;
    // A view that is written to later takes a history from what it is a view of.
    const bool is_view = tensor.is_view() && autograd::impl::get_view_autograd_meta(tensor) != nullptr &&
                         autograd::impl::get_view_autograd_meta(tensor)->has_bw_view();
    const at::Tensor base = is_view ? at::Tensor(tensor._base()) : at::Tensor();
    lead(tensor, output);
    if (base.defined()) lead(base, -1);
  }
}

void HookedCall::Backward::lead_out(const at::Tensor& tensor, std::int64_t output) {
  auto exit = value::make_node<Exit>(shared_from_this(), output);
  if (entry_->num_inputs() == 0) entry_->add_input_metadata(tensor);
  exit->set_next_edges({autograd::impl::gradient_edge(tensor), autograd::Edge(entry_, 0)});
  const auto place = exit->add_input_metadata(tensor);
  autograd::impl::set_gradient_edge(tensor, {std::move(exit), static_cast<std::uint32_t>(place)});
}

void HookedCall::Backward::begin() {
  if (open_) return;
  begin_all(hooks_, call_, &CallHook::before_backward, &CallHook::after_backward);
  open_ = true;
  // A backward that asks for the gradients of given tensors may leave out the Entry.
  autograd::Engine::get_default_engine().queue_callback([self = weak_from_this()] {
    if (const auto backward = self.lock()) value::for_user([&] { backward->end(); });
  });
}

void HookedCall::Backward::end() {
  if (!std::exchange(open_, false)) return;
  end_all(hooks_, call_, &CallHook::after_backward);
}

HookedCall::HookedCall(Hooks hooks, ModuleCall call, std::span<const at::Tensor> inputs)
    : backward_(std::make_shared<Backward>(std::move(hooks), std::move(call))) {
  backward_->begin_forward(inputs);
}

HookedCall::~HookedCall() {
  if (!over_) end_quietly(backward_->call(), [this] { backward_->end_forward(); });
}

void HookedCall::end(std::span<const at::Tensor> outputs) {
  over_ = true;
  backward_->show(outputs);
  backward_->end_forward();
  backward_->watch(outputs);
}

namespace {

// Modules as requests call them, where some have hooks.
class HookedModules : public Modules {
 public:
  HookedModules(const CallHooks& hooks, std::shared_ptr<Modules> modules)
      : hooks_(hooks), modules_(std::move(modules)) {}

  std::string name(base::ModuleId id) const override { return modules_->name(id); }
  bool dynamic(base::ModuleId id) const override { return modules_->dynamic(id); }
  CallerState capture_state(base::ModuleId id) override { return modules_->capture_state(id); }
  void hear(const std::string& news) override { modules_->hear(news); }
  bool starts_rng_stream(base::ModuleId id) const override { return modules_->starts_rng_stream(id); }
  int rng_streams(base::ModuleId id) const override { return modules_->rng_streams(id); }
  value::Value call(base::ModuleId id, const std::string& state, value::Value arguments) override {
    return hooks_.call(*modules_, id, state, std::move(arguments), /*remote=*/true);
  }

 private:
  const CallHooks& hooks_;
  const std::shared_ptr<Modules> modules_;
};

}  // namespace

void CallHooks::add(std::shared_ptr<CallHook> hook, std::vector<std::string> names) {
  for (auto& name : names) added_.emplace_back(std::move(name), hook);
}

void CallHooks::remove(const std::shared_ptr<CallHook>& hook) {
  std::erase_if(added_, [&](const auto& each) { return each.second == hook; });
  for (auto& [module, named] : by_module_) std::erase(named.second, hook);
  std::erase_if(by_module_, [](const auto& each) { return each.second.second.empty(); });
}

void CallHooks::number(const std::vector<std::string>& names) {
  by_module_.clear();
  for (const auto& [name, hook] : added_) {
    const auto found = std::ranges::find(names, name);
    if (found == names.end()) throw base::UsageError(base::str("hooks of ", name, ", which is no module of the model"));
    auto& [known, hooks] = by_module_[found - names.begin()];
    known = name;
    hooks.push_back(hook);
  }
}

bool CallHooks::want_tensors() const {
  return std::ranges::any_of(added_, [](const auto& each) { return each.second->wants_tensors(); });
}

std::unique_ptr<HookedCall> CallHooks::begin(base::ModuleId module, bool remote,
                                             std::span<const at::Tensor> inputs) const {
  const auto& [name, hooks] = by_module_.at(module.value);
  return std::make_unique<HookedCall>(hooks, ModuleCall{module, name, remote, calls_++}, inputs);
}

std::unique_ptr<HookedCall> CallHooks::begin_for(bool shown, base::ModuleId module, bool remote,
                                                 std::span<const at::Tensor> inputs) const {
  const auto& [name, hooks] = by_module_.at(module.value);
  Hooks some;
  std::ranges::copy_if(hooks, std::back_inserter(some),
                       [&](const auto& hook) { return hook->wants_tensors() == shown; });
  return std::make_unique<HookedCall>(std::move(some), ModuleCall{module, name, remote, calls_++}, inputs);
}

value::Value CallHooks::call(Modules& modules, base::ModuleId module, const std::string& state, value::Value arguments,
                             bool remote) const {
  if (!has(module)) return modules.call(module, state, std::move(arguments));
  std::vector<at::Tensor> inputs;
  if (want_tensors()) {
    value::for_each_tensor(arguments, [&](const at::Tensor& tensor) { inputs.push_back(tensor); });
  }
  const auto call = begin(module, remote, inputs);
  auto result = modules.call(module, state, std::move(arguments));
  std::vector<at::Tensor> outputs;
  value::for_each_tensor(result, [&](const at::Tensor& tensor) { outputs.push_back(tensor); });
  call->end(outputs);
  return result;
}

std::shared_ptr<Modules> CallHooks::around(std::shared_ptr<Modules> modules) const {
  if (added_.empty()) return modules;
  return std::make_shared<HookedModules>(*this, std::move(modules));
}

}  // namespace lamina::model
