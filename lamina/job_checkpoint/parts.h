// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <string_view>

#include "lamina/checkpoint/part.h"
#include "lamina/checkpoint/writers.h"
#include "lamina/collective/ranks.h"
#include "lamina/distributed_optimizer/local_parameters.h"

namespace lamina::job_checkpoint {

using distributed_optimizer::LocalParameters;

// This rank's parts of a model that is cut, and of its optimizers: see [Note: parts] of lamina/checkpoint/part.h.
class Parts {
 public:
  // The table outlives it.
  Parts(collective::Ranks ranks, const model::ParameterTable& table);

  const model::ParameterTable& table() const { return table_; }

  // Where this rank's elements of a thing lie in the whole, and whether it is the one that writes them.
  struct Piece {
    layout::Shape shape;  // of the whole
    layout::Region region;
    bool writes = false;
    bool is_first = false;                        // with its first element
    std::optional<layout::Slicing> slicing = {};  // where these are of a slice
  };

  // Finds a parameter or buffer that is here.
  Piece of_row(const model::Parameter& row) const { return of(row.layout); }
  // Finds what stands in an optimizer's groups for the parameter of this name, a master say.
  Piece of_local(const at::Tensor& local, std::string_view name) const;
  // Finds a state that belongs to it, a tensor of these sizes here.
  Piece of_state(const LocalParameters& locals, const at::Tensor& local, std::string_view name,
                 at::IntArrayRef sizes) const;
  // Collective over those who have the other slices: all of what a piece is a slice of.
  at::Tensor whole_of(const Piece& piece, const at::Tensor& elements) const;

 private:
  Piece of(const layout::ParameterLayout& layout) const;
  Piece of_whole(at::IntArrayRef sizes) const;  // that is not the model's

  const collective::Ranks ranks_;
  const model::ParameterTable& table_;
  const checkpoint::Writers writers_;
};

}  // namespace lamina::job_checkpoint
