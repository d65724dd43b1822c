// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "lamina/session/checkpoint_parts.h"

namespace lamina::session {

using distributed_optimizer::LocalParameters;

// A state that belongs to what stands in an optimizer's groups for a parameter.
struct StateName {
  int optimizer = 0;
  std::string state;  // "" of a master
  std::string parameter;
};

// The parts that this rank writes into a checkpoint, as a face lists all that it has. Throws base::UsageError for what
// has no place in one, whoever would write it.
class PartsToSave {
 public:
  // They outlive it.
  explicit PartsToSave(const CheckpointParts& parts) : parts_(parts) {}

  // Adds this rank's part of the row of this name, which has other names besides.
  void add_row(const std::string& name, const at::Tensor& elements, std::vector<std::string> also);
  // A state, or the master itself, of what stands at `place`.
  void add_state(const LocalParameters& locals, const StateName& of, const at::Tensor& place, const at::Tensor& value);
  void add_content(const std::string& name, const at::Tensor& value);

  std::vector<checkpoint::Part> take() { return std::exchange(to_write_, {}); }

 private:
  void add(archive::SavedTensor tensor, CheckpointParts::Place place, const at::Tensor& elements);

  const CheckpointParts& parts_;
  std::vector<checkpoint::Part> to_write_;
};

// The name of a tensor that stands in what a manifest tells about a checkpoint.
std::string content_name(std::size_t number);

}  // namespace lamina::session
