// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "lamina/model/parameter_table.h"
#include "lamina/session/session.h"
#include "lamina/sharding/sharding.h"

// [Note: errors of devices] Two errors of a rank's device say too little. Memory that is full: torch knows how much,
// and not what for. A kernel that has failed: a later call says so. Each face adds one of these lines to such an error,
// once, where it hands it on: to the program, or to other ranks.
namespace lamina::session {

// Tensors of this rank, by what they are for.
struct TensorsHeld {
  std::vector<at::Tensor> parameters;  // and buffers
  std::vector<at::Tensor> gradients, optimizer_states;
};

// Finds those of a model that is cut; nullptr: nothing is sharded. The states are for the caller to add.
TensorsHeld tensors_of(const model::ParameterTable& table, sharding::Sharding* sharding);

// The line on memory that is full: the rank, the module that asked for more, "" where nobody knows, the bytes of each
// kind, and the keys that lower them.
std::string told_of_full_memory(Session& session, const TensorsHeld& held, const std::string& module);

// The line on a kernel that has failed. "" where the device goes on, so that the error was another one.
std::string told_of_failed_kernel(const Session& session);

}  // namespace lamina::session
