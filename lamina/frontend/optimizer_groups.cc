// SPDX-License-Identifier: Apache-2.0
#include "lamina/frontend/optimizer_groups.h"

#include <c10/core/GradMode.h>

#include <algorithm>
#include <iterator>
#include <sstream>
#include <utility>

#include "lamina/base/str.h"
#include "lamina/model/values.h"

namespace lamina::frontend {
namespace {

using fused::Needs;

constexpr const char* kMaster = "master";  // of a parameter, between ranks: the name of no field

using States = ska::flat_hash_map<void*, std::unique_ptr<torch::optim::OptimizerParamState>>;

void move(States& states, const at::Tensor& before, const at::Tensor& after) {
  const auto found = states.find(before.unsafeGetTensorImpl());
  if (found == states.end()) return;
  auto state = std::move(found->second);
  states.erase(found);
  states[after.unsafeGetTensorImpl()] = std::move(state);
}

// Wholes in the places of parts, as long as it lives.
class InWholes {
 public:
  InWholes(torch::optim::Optimizer& optimizer, session::OptimizerSteps& steps) : optimizer_(optimizer), steps_(steps) {
    std::vector<at::Tensor> places;
    for (const auto& group : optimizer.param_groups()) {
      places.insert(places.end(), group.params().begin(), group.params().end());
    }
    const auto in_step = steps.begin_wholes(places);
    std::size_t next = 0;
    for (auto& group : optimizer.param_groups()) {
      std::vector<at::Tensor> updated;
      for (const auto& place : group.params()) {
        const auto& whole = in_step[next++];
        if (!whole.defined()) continue;
        updated.push_back(whole);
        if (whole.is_same(place)) continue;
        move(optimizer.state(), place, whole);
        wholes_.emplace_back(place, whole);
      }
      put_aside_.push_back(std::exchange(group.params(), std::move(updated)));
    }
  }
  InWholes(const InWholes&) = delete;
  InWholes& operator=(const InWholes&) = delete;
  ~InWholes() {
    for (std::size_t i = 0; i < put_aside_.size(); ++i) optimizer_.param_groups()[i].params() = put_aside_[i];
    for (const auto& [place, whole] : wholes_) move(optimizer_.state(), whole, place);
    steps_.forget_wholes();
  }

 private:
  torch::optim::Optimizer& optimizer_;
  session::OptimizerSteps& steps_;
  std::vector<std::vector<at::Tensor>> put_aside_;
  std::vector<std::pair<at::Tensor, at::Tensor>> wholes_;  // with their parts
};

bool is_like(const c10::IValue& field, const at::Tensor& tensor) {
  return field.isTensor() && field.toTensor().defined() && field.toTensor().dim() > 0 &&
         field.toTensor().sizes() == tensor.sizes();
}

}  // namespace

void OptimizerGroups::replace(const HeldHere& held) {
  auto& groups = optimizer_.param_groups();
  std::vector<at::Tensor> beside;
  for (auto i = made_with_.size(); i < groups.size(); ++i) {
    const auto& all = groups[i].params();
    std::ranges::copy_if(all, std::back_inserter(beside), [&](const auto& each) { return steps_.is_beside(each); });
  }
  steps_.take_beside(beside);
  for (auto i = made_with_.size(); i < groups.size(); ++i) {
    std::vector<at::Tensor> here;
    auto& numbers = held_.emplace_back();
    for (std::size_t k = 0; k < groups[i].params().size(); ++k) {
      const auto& parameter = groups[i].params()[k];
      const bool is_here = steps_.updates_beside() || !steps_.is_beside(parameter);
      auto own = is_here ? held(parameter) : at::Tensor();
      if (own.defined()) own = steps_.place_of(own);
      if (!own.defined() || !own.is_same(parameter)) optimizer_.state().erase(parameter.unsafeGetTensorImpl());
      if (!own.defined()) continue;
      here.push_back(std::move(own));
      numbers.push_back(static_cast<std::int64_t>(k));
    }
    made_with_.push_back(std::exchange(groups[i].params(), std::move(here)));
  }
  if (needs_ == Needs::kWhole) steps_.spread_wholes(places());
}

std::vector<at::Tensor> OptimizerGroups::places() const {
  std::vector<at::Tensor> all;
  for (const auto& group : optimizer_.param_groups()) {
    all.insert(all.end(), group.params().begin(), group.params().end());
  }
  return all;
}

std::string OptimizerGroups::options(bool counts) const {
  std::string text;
  for (std::size_t i = 0; i < optimizer_.param_groups().size(); ++i) {
    const auto count = optimizer_.param_groups()[i].params().size();
    if (counts) text += base::str("\nthe number of parameters of group ", i, " = ", count);
    for (const auto& [name, value] : options_of(optimizer_.param_groups()[i])) {
      std::ostringstream word;
      word.precision(12);  // machines may round the last digits of a schedule differently
      value.isDouble() ? word << value.toDouble() : word << value;
      text += base::str("\n", name, " of group ", i, " = ", word.str());
    }
  }
  return text;
}

void OptimizerGroups::update(const std::function<void()>& update) {
  if (needs_ != Needs::kWhole) return update();
  const InWholes wholes(optimizer_, steps_);
  update();
  steps_.end_wholes();
}

// States.

std::vector<std::vector<OptimizerGroups::Place>> OptimizerGroups::numbered() const {
  std::vector<std::vector<Place>> groups;
  std::int64_t first = 0;
  for (std::size_t i = 0; i < optimizer_.param_groups().size(); ++i) {
    const auto& here = optimizer_.param_groups()[i].params();
    const bool replaced = i < made_with_.size();
    auto& group = groups.emplace_back();
    for (std::size_t k = 0; k < here.size(); ++k) {
      group.push_back({first + (replaced ? held_[i][k] : static_cast<std::int64_t>(k)), here[k]});
    }
    first += std::ssize(replaced ? made_with_[i] : here);
  }
  return groups;
}

std::vector<std::vector<at::Tensor>> OptimizerGroups::made_with() const {
  auto groups = made_with_;
  for (auto i = groups.size(); i < optimizer_.param_groups().size(); ++i) {
    groups.push_back(optimizer_.param_groups()[i].params());
  }
  return groups;
}

OptimizerState OptimizerGroups::state(bool gathers, std::span<const base::Rank> pipeline, messaging::Mailbox& mailbox,
                                      const base::Patience& patience) const {
  steps_.stand_ins().follow();
  auto own = state_of(optimizer_);
  OptimizerState state;
  const auto groups = numbered();
  std::int64_t first = 0;
  for (std::size_t i = 0; i < groups.size(); ++i) {
    auto& group = state.groups.emplace_back();
    group.options = std::move(own.groups[i].options);
    for (const auto& [number, place] : groups[i]) {
      group.parameters.push_back(number);
      if (const auto found = own.states.find(first++); found != own.states.end() && !found->second.empty()) {
        state.states[number] = std::move(found->second);
      }
      if (steps_.is_master(place)) state.masters[number] = place.detach();
    }
  }
  if (!gathers) return state;
  gather_parts(state);
  if (const auto over = steps_.divided_over(); over && needs_ == Needs::kWhole) {
    gather_from(state, steps_.members(*over), mailbox, patience);
  }
  if (pipeline.size() > 1 && !made_with_.empty()) gather_from(state, pipeline, mailbox, patience);
  first = 0;
  for (std::size_t i = 0; i < groups.size(); ++i) {
    auto& parameters = state.groups[i].parameters;
    parameters.clear();
    const auto count = i < made_with_.size() ? std::ssize(made_with_[i]) : std::ssize(groups[i]);
    for (std::int64_t k = 0; k < count; ++k) parameters.push_back(first++);
  }
  return state;
}

// Makes parts whole; collective over those who hold them.
void OptimizerGroups::gather_parts(OptimizerState& state) const {
  for (const auto& group : numbered()) {
    for (const auto& [number, place] : group) {
      if (!steps_.part(place)) continue;
      if (const auto master = state.masters.find(number); master != state.masters.end()) {
        master->second = steps_.whole_of(place, master->second);
      }
      const auto found = state.states.find(number);
      if (needs_ == Needs::kWhole || found == state.states.end()) continue;
      for (auto& [name, field] : found->second) {
        if (is_like(field, place)) field = steps_.whole_of(place, field.toTensor());
      }
    }
  }
}

// Adds what the others of these ranks have; collective over them.
void OptimizerGroups::gather_from(OptimizerState& state, std::span<const base::Rank> ranks, messaging::Mailbox& mailbox,
                                  const base::Patience& patience) const {
  std::map<std::int64_t, Fields> all = std::move(state.states);
  for (const auto& [number, master] : state.masters) all[number][kMaster] = master;
  std::vector<model::Named> own;
  for (const auto& [number, fields] : all)
    own.emplace_back(std::to_string(number), value_of(fields, "the state of an optimizer, in its field"));
  state.states.clear();
  for (const auto& [number, value] : model::gather(std::move(own), /*to_first=*/false, ranks, mailbox, patience)) {
    auto fields = to_fields(value);
    if (const auto master = fields.extract(kMaster)) state.masters[std::stoll(number)] = master.mapped().toTensor();
    if (!fields.empty()) state.states[std::stoll(number)] = std::move(fields);
  }
}

std::string OptimizerGroups::misfit(const OptimizerState& state) const {
  const auto& groups = optimizer_.param_groups();
  if (state.groups.size() != groups.size()) {
    return base::str("the state has ", state.groups.size(), " parameter groups, the optimizer ", groups.size());
  }
  for (std::size_t i = 0; i < groups.size(); ++i) {
    const bool whole = state.saved_by.empty() && i < made_with_.size();
    const auto here = whole ? made_with_[i].size() : groups[i].params().size();
    if (state.groups[i].parameters.size() != here) {
      return base::str("group ", i, " has ", state.groups[i].parameters.size(), " parameters in the state and ", here,
                       " in the optimizer");
    }
  }
  return "";
}

Fields OptimizerGroups::part_of(const Place& place, const Fields& whole) const {
  const auto part = steps_.part(place.tensor);
  if (part && needs_ == Needs::kWhole) return steps_.updates_whole(place.tensor) ? whole : Fields();
  Fields own = whole;
  for (auto& [name, field] : own) {
    if (!is_like(field, part ? part->parameter : place.tensor)) continue;
    const auto value = part ? steps_.part_of(place.tensor, field.toTensor()) : field.toTensor();
    field = value.to(place.tensor.scalar_type());
  }
  return own;
}

void OptimizerGroups::load(const OptimizerState& state, bool options) {
  steps_.stand_ins().follow();
  OptimizerState own;
  if (!options) own.groups = state_of(optimizer_).groups;
  own.groups.resize(optimizer_.param_groups().size());
  const at::NoGradGuard no_grad;
  std::int64_t next = 0;
  const auto groups = numbered();
  for (std::size_t i = 0; i < groups.size(); ++i) {
    if (options) own.groups[i].options = state.groups[i].options;
    own.groups[i].parameters.clear();
    for (const auto& place : groups[i]) {
      const auto local = next++;
      own.groups[i].parameters.push_back(local);
      if (const auto found = state.states.find(place.number); found != state.states.end()) {
        auto fields = state.saved_by.empty() ? part_of(place, found->second) : found->second;
        if (!fields.empty()) own.states[local] = std::move(fields);
      }
      const auto master = state.masters.find(place.number);
      if (master == state.masters.end() || !steps_.is_master(place.tensor)) continue;
      const bool whole = state.saved_by.empty();
      const auto value = whole ? steps_.part_of(place.tensor, master->second) : master->second;
      place.tensor.detach().copy_(value.reshape(place.tensor.sizes()));
    }
  }
  give(optimizer_, own);
}

}  // namespace lamina::frontend
