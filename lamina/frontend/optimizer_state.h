// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/optim/optimizer.h>

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "lamina/distributed_optimizer/state_dicts.h"
#include "lamina/frontend/ivalues.h"
#include "lamina/optim/loss_scale.h"

namespace lamina::frontend {

// The state of an optimizer as its archives have it; fields are values of one parameter, or of a group's options.
// Parameters are numbers: their places in the groups. A rank's part has their names in this order, too.
struct OptimizerState {
  struct Group {
    std::vector<std::int64_t> parameters;
    Fields options;
  };
  std::vector<Group> groups;
  std::map<std::int64_t, Fields> states;
  std::map<std::int64_t, at::Tensor> masters;
  std::optional<optim::LossScale::State> scale;
  std::optional<std::vector<std::string>> names;  // of a rank's part, in the order of numbers
  topology::SavedPlace saved_by;                  // whose part it is
  std::optional<distributed_optimizer::StateDict::Parts> parts;
  std::optional<std::uint64_t> rng_steps;  // with the key `seed`: the steps that have drawn random numbers

  // True of a part as 0.2.0 has saved it: numbers are those of the whole optimizer, and `saved_by` is (rank, ranks) of
  // one copy of the model and of those who divide its states.
  bool has_old_numbers() const { return !names && !saved_by.empty(); }
};

// In the form of torch's optimizers, which leave out what is not theirs. `read` throws base::UsageError for what is no
// such archive.
void write(const OptimizerState& state, torch::serialize::OutputArchive& archive);
OptimizerState read(torch::serialize::InputArchive& archive);

// Makes rows of it, and the way back, with the options of groups.
distributed_optimizer::StateDict rows_of(const OptimizerState& state);
OptimizerState from_rows(const distributed_optimizer::StateDict& rows, std::vector<Fields> options);

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
