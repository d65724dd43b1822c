// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <span>
#include <string>

#include "lamina/config/config.h"
#include "lamina/model/cut.h"
#include "lamina/model/parameter_table.h"
#include "lamina/topology/topology.h"

namespace lamina::model {

// A parameter or buffer of a model, under its first name.
struct NamedTensor {
  std::string name;
  at::Tensor tensor;
  bool buffer = false;
  std::optional<layout::Slicing> slicing = {};  // of the whole that it is a slice of
};

// True of a buffer without a memory of plain elements, sparse or quantised: it is in no table, all ranks keep it.
bool is_odd(const at::Tensor& buffer);

// The table of a model that is cut, of its tensors as they are now: parameters before buffers, in the model's order.
// Here alone the configuration decides on the ranks that hold and that update parameters. Throws base::UsageError as
// whole_in() does.
ParameterTable make_table(const topology::Topology& topology, const config::Config& config, const Cut& cut,
                          std::span<const NamedTensor> tensors, Slice slice_here = {});

// The ranks among which what an optimizer updates of a parameter is divided: those that hold its shards, or its copies;
// none where each rank updates all that it holds. Some parameters stay whole on all of them.
std::optional<topology::Group> updates_divided_over(const topology::Topology& topology, const config::Config& config);

// True where an optimizer updates masters in the place of parameters of half precision.
bool updates_masters(const config::Config& config);

}  // namespace lamina::model
