// SPDX-License-Identifier: Apache-2.0
#include "lamina/frontend/routing.h"

#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/module.h>

#include <set>

#include "lamina/frontend/current.h"
#include "lamina/job_checkpoint/record_job.h"
#include "lamina/remote/anywhere.h"
#include "lamina/runtime/rng_streams.h"
#include "lamina/tensor_parallel/dropout.h"

namespace lamina::frontend {

std::vector<at::Tensor> tensors_in(const value::Value& tree) {
  std::vector<at::Tensor> tensors;
  value::for_each_tensor(tree, [&](const at::Tensor& tensor) { tensors.push_back(tensor); });
  return tensors;
}

namespace {

constexpr char kEndOfTraining = '|';

// The whole of a part that a call has returned, and of its gradient, when that comes.
at::Tensor seen(const at::Tensor& part, const Forward& forward) {
  const auto whole = forward.whole_output(part.detach());
  if (!part.requires_grad()) return whole;
  whole.requires_grad_();
  const auto made = whole.view_as(whole);  // a tensor that has come of the call, whose gradient hooks hear of
  part.register_hook([whole, made, of_gradient = forward.whole_gradient](const at::Tensor& gradient) {
    torch::autograd::grad({made}, {whole}, {of_gradient(gradient.detach())});
  });
  return made;
}

// A call that runs here, in a stream of its own, with hooks, or both. Hooks are in the stream, as those of calls that
// come from other ranks are. Hooks that are shown tensors see wholes, where the call has parts.
struct Here : Router::Scope {
  Here(const TorchModules& modules, const model::CallHooks& hooks, base::ModuleId id)
      : hooks(hooks),
        id(id),
        replaced(replaced_forward(modules.module(id))),
        stream(modules.starts_rng_stream(id) ? runtime::rng_stream_here() : std::optional<runtime::RngStream>()) {}
  bool wants_arguments() const override { return hooks.has(id); }
  void given(const value::Value& arguments) override {
    auto inputs = hooks.want_tensors() ? tensors_in(arguments) : std::vector<at::Tensor>();
    const bool has_parts = replaced != nullptr && (replaced->whole_input || replaced->whole_output);
    if (!has_parts || !hooks.want_tensors()) {
      call = hooks.begin(id, /*remote=*/false, inputs);
      return;
    }
    for (auto& each : inputs) {
      if (replaced->whole_input) each = replaced->whole_input(each.detach());
    }
    call = hooks.begin_for(/*shown=*/false, id, /*remote=*/false);
    shown = hooks.begin_for(/*shown=*/true, id, /*remote=*/false, inputs);
  }
  bool wants_result() const override { return call != nullptr; }
  void returned(const value::Value& result) override {
    const auto outputs = tensors_in(result);
    if (shown != nullptr) {
      auto wholes = outputs;
      for (auto& each : wholes) {
        if (replaced->whole_output) each = seen(each, *replaced);
      }
      shown->end(wholes);
    }
    call->end(outputs);
  }

  const model::CallHooks& hooks;
  const base::ModuleId id;
  const Forward* const replaced;
  const std::optional<runtime::RngStream> stream;
  std::unique_ptr<model::HookedCall> call, shown;
};

}  // namespace

TorchModules::TorchModules(const TorchModuleTree& tree)
    : streams_(tree.starts_rng_stream()), dynamic_(tree.waited_for()) {
  for (int node = 0; node < tree.size(); ++node) {
    const auto& name = tree.nodes()[node].name;
    names_.push_back(name.empty() ? "the model" : name);
    roots_.push_back(tree.module(node));
    parts_.push_back(roots_.back()->modules());
    parameters_.push_back(roots_.back()->parameters());
  }
}

std::string TorchModules::name(base::ModuleId id) const { return names_.at(id.value); }

model::CallerState TorchModules::capture_state(base::ModuleId id) {
  std::string training;
  for (const auto& part : parts_.at(id.value)) training += part->is_training() ? 't' : 'e';
  if (training.find_first_not_of(training[0]) == std::string::npos) training.resize(1);
  training += kEndOfTraining;
  for (const auto& parameter : parameters_.at(id.value)) training += parameter.requires_grad() ? '1' : '0';
  return {std::move(training), ""};
}

value::Value TorchModules::call(base::ModuleId id, const std::string& state, value::Value arguments) {
  apply(id, state);
  auto& parts = arguments.as<value::Tuple>().items;
  const auto invoke = call_kind(parts.at(0).as<std::int64_t>());
  tensor_parallel::note_taken();  // what a call before this one has left, which failed
  auto given = std::move(parts.at(1));
  return invoke(*roots_.at(id.value), std::move(given));
}

void TorchModules::apply(base::ModuleId id, const std::string& state) {
  const auto& parts = parts_.at(id.value);
  const auto count = state.find(kEndOfTraining);
  for (std::size_t i = 0; i < parts.size(); ++i) {
    const bool training = state.at(count == 1 ? 0 : i) == 't';
    if (parts[i]->is_training() != training) parts[i]->train(training);  // and all under it, which come next
  }
}

Routing::Routing(const TorchModuleTree& tree, const model::Cut& cut, session::Session& session) : session_(session) {
  const auto modules = std::make_shared<TorchModules>(tree);
  modules_ = modules;
  auto& hooks = session.job().call_hooks();
  std::vector<std::string> names;
  for (const auto& node : tree.nodes()) names.push_back(node.name);
  hooks.number(names);
  std::set<int> with_buffers;
  for (const auto& buffer : tree.buffers()) {
    const auto& holders = tree.holders(buffer.tensor);
    with_buffers.insert(holders.begin(), holders.end());
  }
  std::vector<base::Rank> ranks;
  for (int node = 0; node < tree.size(); ++node) {
    const base::ModuleId id(node);
    const base::Partition owner(cut.owners()[node]);
    const bool anywhere = cut.anywhere()[node];
    ranks.push_back(anywhere ? remote::kAnywhere : session.owner(owner));
    const bool elsewhere = !anywhere && owner != session.partition();
    const bool writes = with_buffers.contains(node);
    if (!elsewhere && !anywhere && !writes && !modules->starts_rng_stream(id) && !hooks.has(id)) continue;
    places_[tree.module(node).get()] = {this, id, elsewhere, anywhere, writes};
  }
  session.job().set_model(modules, std::move(ranks));
}

std::optional<ModulePlace> Routing::find(const torch::nn::Module* module) {
  const auto found = places_.find(module);
  if (found == places_.end()) return std::nullopt;
  return found->second;
}

value::Value Routing::call(base::ModuleId id, std::int64_t kind, value::Value arguments) {
  return session_.job().call(id, value::Tuple{{kind, std::move(arguments)}});
}

std::unique_ptr<Router::Scope> Routing::enter(base::ModuleId id) {
  const auto& hooks = session_.job().call_hooks();
  end_where_all_is_recorded(&job_checkpoint::JobRecording::begin_call);
  return modules_->starts_rng_stream(id) || hooks.has(id) ? std::make_unique<Here>(*modules_, hooks, id) : nullptr;
}

}  // namespace lamina::frontend
