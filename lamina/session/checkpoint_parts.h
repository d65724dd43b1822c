// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <string_view>

#include "lamina/checkpoint/part.h"
#include "lamina/checkpoint/save.h"
#include "lamina/checkpoint/writers.h"
#include "lamina/distributed_optimizer/local_parameters.h"
#include "lamina/session/session.h"

namespace lamina::session {

using distributed_optimizer::LocalParameters;

// This rank's parts of a model that is cut, and of its optimizers: see [Note: parts] of lamina/checkpoint/part.h.
class CheckpointParts {
 public:
  // Both outlive it.
  CheckpointParts(const Session& session, const model::ParameterTable& table);

  const model::ParameterTable& table() const { return table_; }

  // Where this rank's elements of a thing lie in the whole, and whether it is the one that writes them.
  struct Place {
    layout::Shape shape;  // of the whole
    layout::Region region;
    bool writes = false;
  };

  // Finds a parameter or buffer that is here.
  Place of_row(const model::Parameter& row) const { return of(row.layout); }
  // Finds what stands at `place` in an optimizer's groups for the parameter of this name, a master say.
  Place of_place(const at::Tensor& place, std::string_view name) const;
  // Finds a state that belongs to it, a tensor of these sizes here.
  Place of_state(const LocalParameters& locals, const at::Tensor& place, std::string_view name,
                 at::IntArrayRef sizes) const;

 private:
  Place of(const layout::ParameterLayout& layout) const;
  Place of_whole(at::IntArrayRef sizes) const;  // that is not the model's

  const Session& session_;
  const model::ParameterTable& table_;
  const checkpoint::Writers writers_;
};

// All ranks of the job, as saves and loads know them.
checkpoint::Peers peers_of(Session& session);

}  // namespace lamina::session
