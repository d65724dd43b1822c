// SPDX-License-Identifier: Apache-2.0
#include <c10/util/ScopeExit.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <set>
#include <string>

#include "lamina/frontend/current.h"
#include "lamina/frontend/model.h"
#include "lamina/frontend/plain_model.h"
#include "lamina/frontend/routing.h"
#include "lamina/frontend/slicing_plan.h"
#include "lamina/session/step_check.h"

// The part of a model that has its first steps compared with the plain model's: see [Note: step check].
namespace lamina::frontend {
namespace {

// Names of parameters that the program has hooks of, on this rank.
std::set<std::string> hooked(const std::vector<ModuleTensor>& parameters) {
  std::set<std::string> names;
  for (const auto& held : parameters) {
    if (!torch::autograd::impl::hooks(held.tensor).empty()) names.insert(held.name);
  }
  return names;
}

// True where a plan cuts layers, whose forwards and numbers of heads are no more the plain model's.
bool has_plans(const torch::nn::Module& root) {
  return std::ranges::any_of(root.modules(), [](const auto& module) { return plan_of(*module).has_value(); });
}

}  // namespace

bool Model::is_checked() const { return job_.check != nullptr; }

std::vector<session::CheckedTensor> Model::checked(const std::vector<ModuleTensor>& all) const {
  std::vector<session::CheckedTensor> tensors;
  for (const auto& held : all) {
    tensors.push_back({held.name, held.tensor});
    const auto slicing = slicings_.find(held.tensor.unsafeGetTensorImpl());
    if (slicing != slicings_.end()) tensors.back().slicing = slicing->second;
  }
  return tensors;
}

// Leaves what is not here out.
std::vector<ModuleTensor> Model::here(std::vector<ModuleTensor> all) const {
  std::erase_if(all, [this](const auto& held) { return !table().is_here(held.tensor); });
  return all;
}

void Model::look_for_room() {
  if (!is_checked()) return;
  job_.check->look_for_room(checked(tree_.tensors()));
  end_checks_if_over();
}

void Model::take_plain_values() {
  if (!partitioned()) return job_.check->take_first_values(checked(tree_.tensors()));
  const auto parameters = here(tree_.parameters());
  job_.check->take_values({checked(here(tree_.tensors())), sharding_.get(), hooked(parameters), {}});
}

std::shared_ptr<TorchPlainModel> Model::plain_model(const std::optional<Example>& call) const {
  const bool is_wanted = call && is_checked() && job_.check->leads();
  return is_wanted ? std::make_shared<TorchPlainModel>(tree_, *call) : nullptr;
}

void Model::call_plainly(const std::optional<Example>& call, std::shared_ptr<TorchPlainModel> plain) {
  if (!job_.check->leads()) return;
  if (!slicings_.empty() && has_plans(*tree_.root())) {
    return job_.check->leave_out("layers that plans cut are not called plainly in C++ programs");
  }
  if (plain == nullptr) return job_.check->run_plainly(std::nullopt);
  session::PlainCall made{std::move(plain), {}, tensors_in(call->arguments), {}, hooked(tree_.parameters())};
  made.modules = tree_.names();
  for (const auto& held : tree_.parameters()) made.parameters.emplace_back(held.name, held.tensor);
  job_.check->run_plainly(made);
}

void Model::begin_checked_step() { job_.check->begin_step(checked(here(tree_.parameters()))); }

void Model::see_outputs(const value::Value& outputs) {
  if (is_checked()) job_.check->see_outputs(tensors_in(outputs));
}

void Model::end_checked_step(std::int64_t other_backwards) {
  const bool are_others = backwards_.plain() != other_backwards;
  job_.check->run_backward(are_others ? "the step runs backwards that are not those of its model" : "");
  const auto over = c10::make_scope_exit([this] { end_checks_if_over(); });
  job_.check->end_step();
}

void Model::end_checks_if_over() {
  if (!job_.check->is_over()) return;
  job_.check.reset();
  backwards_.count_others(false);
}

// Runs a step of one partition, which is called plainly where its body calls it first.
pipeline::StepResult Model::run_alone(const pipeline::StepSpec& spec) {
  auto& job = job_.session->job();
  if (!is_checked()) return job.run_step_here(spec);
  take_plain_values();
  begin_checked_step();
  expect_first_call();
  const auto routed = c10::make_scope_exit([this] { set_router(routing_.get()); });
  auto result = job.run_step_here(spec);
  if (wants_first_call()) call_plainly(std::nullopt, nullptr);
  return result;
}

}  // namespace lamina::frontend
