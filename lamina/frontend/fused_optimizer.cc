// SPDX-License-Identifier: Apache-2.0
#include "lamina/frontend/fused_optimizer.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/GradMode.h>
#include <torch/optim/serialize.h>

#include <cmath>

#include "lamina/base/error.h"
#include "lamina/base/str.h"
#include "lamina/distributed_optimizer/local_parameters.h"
#include "lamina/optim/step.h"
#include "lamina/value/guarded.h"

namespace lamina {
namespace {

using optim::Functional;
using torch::serialize::InputArchive;
using torch::serialize::OutputArchive;

std::shared_ptr<const Functional> functional_named(const std::string& name) {
  auto found = functional_optimizers().find(name);
  if (found == nullptr) throw base::UsageError(base::str("there is no optimizer with the name ", name));
  return found;
}

// The states of one parameter, as an archive has them: by the names of the declaration.
struct FusedState : torch::optim::OptimizerParamState {
  explicit FusedState(const Functional& its) : functional(its) {}

  std::unique_ptr<OptimizerParamState> clone() const override { return std::make_unique<FusedState>(*this); }

  void serialize(OutputArchive& archive) const override {
    if (!state.started) return;
    std::size_t tensor = 0, number = 0;
    for (const auto& field : functional.declaration().states) {
      if (fused::is_number(field.kind)) {
        archive.write(field.name, c10::IValue(state.numbers.at(number++)));
      } else if (const auto& value = state.tensors.at(tensor++); value.defined()) {
        archive.write(field.name, value, /*is_buffer=*/true);
      }
    }
  }

  void serialize(InputArchive& archive) override {
    state = {};
    for (const auto& field : functional.declaration().states) {
      if (fused::is_number(field.kind)) {
        c10::IValue value;
        const bool found = archive.try_read(field.name, value);
        state.numbers.push_back(found ? value.toDouble() : 0);
        state.started = state.started || found;
      } else {
        auto& value = state.tensors.emplace_back();
        state.started = archive.try_read(field.name, value, /*is_buffer=*/true) || state.started;
      }
    }
    if (!state.started) state = {};
  }

  const Functional& functional;
  optim::State state;
};

// Calls `work(name, first, count)` for each option that torch's groups have, which is a tuple of several
// hyper-parameters where `count` is more than 1.
template <class Work>
void each_option(const fused::Declaration& declaration, const Work& work) {
  const auto hyper = declaration.hyper;
  for (std::size_t first = 0, count = 1; first < hyper.size(); first += count, count = 1) {
    const std::string_view tuple = hyper[first].tuple;
    while (!tuple.empty() && first + count < hyper.size() && hyper[first + count].tuple == tuple) ++count;
    work(std::string(tuple.empty() ? hyper[first].name : tuple), first, count);
  }
}

// A hyper-parameter as groups of Python have it.
c10::IValue option_of(const fused::HyperField& field, double value) {
  if (field.bound == fused::Bound::kFlag) return value != 0;
  if (field.bound == fused::Bound::kChoice) return fused::hyper_word(field, value);
  return value;
}

double number_of(const fused::HyperField& field, const c10::IValue& option) {
  if (option.isString()) return fused::hyper_value(field, option.toStringRef().c_str());
  if (option.isBool()) return option.toBool() ? 1 : 0;
  return option.toScalar().toDouble();
}

c10::IValue part_of(const c10::IValue& option, std::size_t place, std::size_t count) {
  if (count == 1) return option;
  return option.isTuple() ? option.toTupleRef().elements().at(place) : c10::IValue(option.toListRef().vec().at(place));
}

std::string key_of(const at::Tensor& parameter) {
  return std::to_string(reinterpret_cast<std::size_t>(parameter.unsafeGetTensorImpl()));
}

}  // namespace

optim::Registry& functional_optimizers() { return optim::shared_registry(); }

FusedOptions::FusedOptions(std::shared_ptr<const Functional> functional, const HyperValues& given,
                           std::optional<std::vector<double>> presets)
    : functional_(std::move(functional)) {
  const auto& declaration = functional_->declaration();
  if (!presets) {
    values_ = fused::hyper_values(declaration, given);
  } else {
    values_ = std::move(*presets);
    for (const auto& [name, value] : given) set(name, value);
  }
  functional_->check(values_);
}

double FusedOptions::get(std::string_view name) const {
  const auto index = fused::hyper_index(functional_->declaration(), name);
  if (index < values_.size()) return values_[index];
  throw base::UsageError(
      base::str(functional_->declaration().name, " has no hyper-parameter with the name ", std::string(name)));
}

void FusedOptions::set(std::string_view name, fused::HyperValue value) {
  get(name);
  const auto& declaration = functional_->declaration();
  const auto index = fused::hyper_index(declaration, name);
  auto values = values_;
  values[index] = fused::hyper_value(declaration.hyper[index], value);
  functional_->check(values);
  values_ = std::move(values);
}

// An option that the archive lacks has its preset: classes of Python do not have all that their form here knows.
void FusedOptions::serialize(InputArchive& archive) {
  auto values = values_;
  each_option(functional_->declaration(), [&](const std::string& name, std::size_t first, std::size_t count) {
    c10::IValue option;
    const bool found = archive.try_read(name, option);
    for (std::size_t i = 0; i < count; ++i) {
      const auto& field = functional_->declaration().hyper[first + i];
      if (!found && std::isnan(field.preset)) throw base::UsageError(base::str("there is no value of ", name));
      values[first + i] = !found ? field.preset : number_of(field, part_of(option, i, count));
    }
  });
  functional_->check(values);
  values_ = std::move(values);
}

void FusedOptions::serialize(OutputArchive& archive) const {
  const auto& hyper = functional_->declaration().hyper;
  each_option(functional_->declaration(), [&](const std::string& name, std::size_t first, std::size_t count) {
    std::vector<c10::IValue> parts;
    for (std::size_t i = first; i < first + count; ++i) parts.push_back(option_of(hyper[i], values_[i]));
    archive.write(name, count == 1 ? parts.front() : c10::IValue(c10::ivalue::Tuple::create(std::move(parts))));
  });
}

FusedOptimizer::FusedOptimizer(std::shared_ptr<const Functional> functional, const std::vector<Group>& groups,
                               const HyperValues& hyper)
    : Optimizer(std::vector<torch::optim::OptimizerParamGroup>(), std::make_unique<FusedOptions>(functional, hyper)),
      functional_(std::move(functional)) {
  for (const auto& group : groups) add_param_group({group.parameters, options(group.hyper)});
}

FusedOptimizer::FusedOptimizer(const std::string& name, const std::vector<Group>& groups, const HyperValues& hyper)
    : FusedOptimizer(functional_named(name), groups, hyper) {}

FusedOptimizer::FusedOptimizer(const std::string& name, std::vector<at::Tensor> parameters, const HyperValues& hyper)
    : FusedOptimizer(functional_named(name), {{std::move(parameters), {}}}, hyper) {}

std::unique_ptr<torch::optim::OptimizerOptions> FusedOptimizer::options(const HyperValues& hyper) const {
  return std::make_unique<FusedOptions>(functional_, hyper, static_cast<const FusedOptions&>(defaults()).values());
}

// torch's own would give the group the optimizer's options: it merges those of its own classes alone.
void FusedOptimizer::add_param_group(const torch::optim::OptimizerParamGroup& group) {
  Optimizer::add_param_group(group);
  if (group.has_options()) param_groups().back().set_options(group.options().clone());
}

at::Tensor FusedOptimizer::step(LossClosure closure) {
  at::Tensor loss;
  if (closure != nullptr) {
    const at::AutoGradMode records(true);
    loss = closure();
  }
  Around alone;
  if (functional_->declaration().gradient_norm) {
    std::vector<at::Tensor> gradients;
    for (const auto& group : param_groups()) {
      for (const auto& parameter : group.params()) gradients.push_back(parameter.grad());
    }
    double sum = 0;
    for (const double square : optim::squared_norms(gradients, *optim::shared_threads())) sum += square;
    alone.norm = std::sqrt(sum);
  }
  step_in(alone);
  return loss;
}

void FusedOptimizer::step_in(const Around& around) {
  const at::NoGradGuard no_grad;
  const value::Updating updating;
  std::vector<optim::GroupStep> steps;
  for (const auto& group : param_groups()) {
    auto& [given, updates] = steps.emplace_back();
    given = {.hyper = static_cast<const FusedOptions&>(group.options()).values(),
             .gradient_scale = around.factor,
             .gradient_norm = around.norm};
    for (const auto& parameter : group.params()) {
      if (!parameter.grad().defined()) continue;
      auto& own = state()[parameter.unsafeGetTensorImpl()];
      if (own == nullptr) own = std::make_unique<FusedState>(*functional_);
      updates.push_back(
          {.parameter = &parameter, .gradient = &parameter.grad(), .state = &static_cast<FusedState&>(*own).state});
    }
  }
  const auto threads = optim::shared_threads();
  if (around.parameters != nullptr) {
    around.parameters->update(*functional_, steps, *threads);
  } else {
    optim::step_groups(*functional_, steps, *threads);
  }
}

// The form of torch::optim::serialize(), whose types have no hyper-parameters by name.
void FusedOptimizer::save(OutputArchive& archive) const {
  archive.write("pytorch_version", c10::IValue("1.5.0"));
  OutputArchive states(archive.compilation_unit()), groups(archive.compilation_unit());
  for (const auto& [parameter, state] : this->state()) {
    OutputArchive fields(archive.compilation_unit());
    state->serialize(fields);
    states.write(std::to_string(reinterpret_cast<std::size_t>(parameter)), fields);
  }
  archive.write("state", states);
  const auto count = [](std::size_t number) { return at::scalar_tensor(static_cast<std::int64_t>(number), at::kLong); };
  groups.write("param_groups/size", count(param_groups().size()));
  for (std::size_t i = 0; i < param_groups().size(); ++i) {
    const auto& parameters = param_groups()[i].params();
    OutputArchive group(archive.compilation_unit()), options(archive.compilation_unit());
    group.write("params/size", count(parameters.size()));
    for (std::size_t k = 0; k < parameters.size(); ++k) {
      group.write("params/" + std::to_string(k), c10::IValue(key_of(parameters[k])));
    }
    param_groups()[i].options().serialize(options);
    group.write("options", options);
    groups.write("param_groups/" + std::to_string(i), group);
  }
  archive.write("param_groups", groups);
}

void FusedOptimizer::load(InputArchive& archive) {
  InputArchive states, groups;
  archive.read("state", states);
  archive.read("param_groups", groups);
  const auto count = [](InputArchive& from, const std::string& key) {
    at::Tensor number;
    from.read(key, number);
    return static_cast<std::size_t>(number.item<std::int64_t>());
  };
  if (count(groups, "param_groups/size") != param_groups().size()) {
    throw base::UsageError(base::str("the archive has ", count(groups, "param_groups/size"),
                                     " parameter groups, the optimizer ", param_groups().size()));
  }
  for (std::size_t i = 0; i < param_groups().size(); ++i) {
    auto& parameters = param_groups()[i].params();
    InputArchive group, options;
    groups.read("param_groups/" + std::to_string(i), group);
    if (count(group, "params/size") != parameters.size()) {
      throw base::UsageError(base::str("group ", i, " has ", count(group, "params/size"),
                                       " parameters in the archive and ", parameters.size(), " in the optimizer"));
    }
    group.read("options", options);
    param_groups()[i].options().serialize(options);
    for (std::size_t k = 0; k < parameters.size(); ++k) {
      c10::IValue key;
      group.read("params/" + std::to_string(k), key);
      InputArchive fields;
      if (!states.try_read(key.toStringRef(), fields)) continue;
      auto own = std::make_unique<FusedState>(*functional_);
      own->serialize(fields);
      state()[parameters[k].unsafeGetTensorImpl()] = std::move(own);
    }
  }
}

}  // namespace lamina
