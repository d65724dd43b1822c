// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/optim/optimizer.h>

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "lamina/frontend/ivalues.h"
#include "lamina/optim/loss_scale.h"

namespace lamina::frontend {

// The state of an optimizer as its archives have it; fields are values of one parameter, or of a group's options.
// Parameters are numbers: their places in the groups of the whole optimizer.
struct OptimizerState {
  struct Group {
    std::vector<std::int64_t> parameters;
    Fields options;
  };
  std::vector<Group> groups;
  std::map<std::int64_t, Fields> states;
  std::map<std::int64_t, at::Tensor> masters;
  std::optional<optim::LossScale::State> scale;
  std::vector<std::int64_t> saved_by;  // whose part it is; empty for the state of a whole optimizer
};

// In the form of torch's optimizers, which leave out what is not theirs. `read` throws base::UsageError for what is no
// such archive.
void write(const OptimizerState& state, torch::serialize::OutputArchive& archive);
OptimizerState read(torch::serialize::InputArchive& archive);

// The options of a group; none where it has its optimizer's.
Fields options_of(const torch::optim::OptimizerParamGroup& group);

// The state of one parameter as the engine has it. Throws as value_of().
inline value::Value state_value(const Fields& fields) {
  return value_of(fields, "the state of an optimizer, in its field");
}
// The fields of one parameter's state; the way back, into one of its class.
Fields fields_of(const torch::optim::OptimizerParamState& state);
void give(torch::optim::OptimizerParamState& state, const Fields& fields);

// Reads an optimizer's own state, with numbers for its own parameters, and puts one into the place of its own.
OptimizerState state_of(const torch::optim::Optimizer& optimizer);
void give(torch::optim::Optimizer& optimizer, const OptimizerState& state);

}  // namespace lamina::frontend
