// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/optim/optimizer.h>

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "lamina/optim/functional.h"
#include "lamina/optim/registry.h"

namespace lamina {

namespace distributed_optimizer {
class LocalParameters;
}

// Hyper-parameters by name: {{"lr", 1e-3}, {"weight_decay_type", "direct"}}.
using HyperValues = std::vector<std::pair<std::string_view, fused::HyperValue>>;

// The optimizers that FusedOptimizer knows by name: SGD, Adam, AdamW, Adagrad, Adadelta, RMSprop, Rprop, Adamax, NAdam,
// RAdam, LAMB, NovoGrad, QHM, and those that a program adds or loads from shared libraries.
optim::Registry& functional_optimizers();

// The hyper-parameters of a group.
class FusedOptions : public torch::optim::OptimizerOptions {
 public:
  // Options that are not given are those of `presets`, or the optimizer's own. Throws base::UsageError for names and
  // values that the optimizer does not have.
  FusedOptions(std::shared_ptr<const optim::Functional> functional, const HyperValues& given,
               std::optional<std::vector<double>> presets = {});

  const std::vector<double>& values() const { return values_; }  // in the order of the declaration
  double get(std::string_view name) const;
  void set(std::string_view name, fused::HyperValue value);

  std::unique_ptr<OptimizerOptions> clone() const override { return std::make_unique<FusedOptions>(*this); }
  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;
  double get_lr() const override { return get("lr"); }  // for torch's schedulers
  void set_lr(double lr) override { set("lr", lr); }

 private:
  std::shared_ptr<const optim::Functional> functional_;
  std::vector<double> values_;
};

// An optimizer with the engine's update, one pass over memory for a whole group in several threads, in the place of
// torch's, for any torch::nn model, wrapped or not:
//
//     lamina::FusedOptimizer adamw("AdamW", net->parameters(), {{"lr", 1e-3}, {"weight_decay", 0.1}});
//     lamina::FusedOptimizer lamb("LAMB", {{weights, {}}, {biases, {{"weight_decay", 0.0}}}}, {{"lr", 1e-3}});
//
// Names, hyper-parameters and presets are those of Python's lamina.optim; a tuple of torch's is as many numbers (beta1
// and beta2). Parameters may lie on any device. Throws base::UsageError for what the optimizer does not take; step()
// does for sparse gradients, and parameters whose elements overlap in memory.
class FusedOptimizer : public torch::optim::Optimizer {
 public:
  // Parameters with the hyper-parameters that differ from the optimizer's.
  struct Group {
    std::vector<at::Tensor> parameters;
    HyperValues hyper;
  };
  FusedOptimizer(const std::string& name, std::vector<at::Tensor> parameters, const HyperValues& hyper = {});
  FusedOptimizer(const std::string& name, const std::vector<Group>& groups, const HyperValues& hyper = {});

  const optim::Functional& functional() const { return *functional_; }
  // Makes the options of a group that is added later, with the optimizer's own hyper-parameters where none are given:
  // adamw.add_param_group({parameters, adamw.options({{"lr", 1e-4}})}).
  std::unique_ptr<torch::optim::OptimizerOptions> options(const HyperValues& hyper) const;
  void add_param_group(const torch::optim::OptimizerParamGroup& group);

  at::Tensor step(LossClosure closure = nullptr) override;
  // As torch's optimizers do: of the same optimizer with as many parameters in its groups.
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

  // An update in a distributed step: gradients are multiplied by `factor`, and have the norm `norm` then.
  struct Around {
    double factor = 1;
    double norm = 0;
    const distributed_optimizer::LocalParameters* parameters = nullptr;  // what stands in the groups
  };
  void step_in(const Around& around);

 private:
  FusedOptimizer(std::shared_ptr<const optim::Functional> functional, const std::vector<Group>& groups,
                 const HyperValues& hyper);

  std::shared_ptr<const optim::Functional> functional_;
};

}  // namespace lamina
