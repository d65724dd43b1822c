// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <string_view>

#include "lamina/foreign/torch_file.h"

namespace lamina::foreign {

// Stores a scalar state of an optimizer (number, flag, None) as a tensor whose name ends in this mark. None for other
// values.
inline constexpr std::string_view kNumberState = "#";
std::optional<archive::SavedTensor> number_state(const nlohmann::json& value);

// Makes states of optimizers out of the dotted names of a state dict, as torch.distributed.checkpoint stores them.
// Tensors are "optim.state.h.0.weight.exp_avg", options "optim.param_groups.0.lr", and names
// "optim.param_groups.0.params". Options may also be given for each parameter, "optim.param_groups.h.0.weight.lr":
// parameters with equal ones make a group.
void take_optimizers(ForeignCheckpoint& checkpoint);

}  // namespace lamina::foreign
