// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "lamina/layout/parameter_layout.h"
#include "lamina/topology/topology.h"

namespace lamina::model {

// How gradients become one: their sum over the group, divided. A parameter that is cut into slices has a gradient of
// its own on each rank of a TP_GROUP.
struct GradientReduction {
  topology::Group over = topology::kReplicas;
  int divisor = 1;
};

// A parameter or buffer of the model: the holders of its elements, the layout that optimizers update in its place, the
// reduction of its gradients, and the tensor that the user's code knows.
struct Parameter {
  layout::ParameterLayout layout;
  layout::ParameterLayout update;  // differs in its dtype where there are masters, in its shards where copies divide it
  GradientReduction reduction;
  at::Tensor tensor;

  bool has_master() const { return update.dtype != layout.dtype; }
  // True where each of those that hold the same elements updates a part of them.
  bool is_divided() const { return update.shards != layout.shards; }
};

// The row of a tensor that one partition holds whole, updated as it is, its gradient their mean over replicas. Throws
// base::UsageError for a dtype that layouts do not know.
Parameter whole_in(base::Partition partition, std::string name, const at::Tensor& tensor, bool buffer, int replicas);

// Makes it the row of a tensor that is a slice of a whole. Throws base::ConfigError where no tensor is cut so.
void slice(Parameter& row, const layout::Slicing& slicing);

// A rank's slice, of so many, of what is cut over all ranks of its TP_GROUP.
struct Slice {
  int index = 0;
  int count = 1;
};

// [Note: parameter table] The one place that says which ranks hold and update each part of the model. Whoever moves,
// reduces, updates, saves or measures parameters reads it; `make_table` makes it when the model is cut, and again where
// its user has put other tensors in the places of some. Parameters come before buffers, each tensor once, in the
// model's order, which is the same on all ranks.
class ParameterTable {
 public:
  // `here`: this rank's partition, of so many. Throws base::UsageError where a name or a tensor is given twice.
  ParameterTable(std::vector<Parameter> all, base::Partition here, int partitions, Slice slice = {});

  const std::vector<Parameter>& all() const { return all_; }
  // The rows with elements on this rank.
  std::vector<const Parameter*> here() const;

  // The row of a tensor, or with a name; nullptr where there is none.
  const Parameter* find(const at::Tensor& tensor) const;
  const Parameter* find(std::string_view name) const;
  // Finds the row of each tensor, or of the parameter whose gradient it is.
  std::vector<const Parameter*> find_with_gradients(std::span<const at::Tensor> tensors) const;

  // Another row whose tensor lies in the memory of this one, or in a part of it, a parameter's where there is one;
  // nullptr where there is none.
  const Parameter* sharer(const at::Tensor& tensor) const;

  // The slice of a row that this rank has where its partition is this one; neighbours may have the same.
  int slice_of(const Parameter& row) const { return slice_.index * row.layout.slices() / slice_.count; }

  bool is_here(const Parameter& row) const { return row.layout.partition == here_; }
  // Says whether this rank has elements of a tensor; true for one that is not the model's.
  bool is_here(const at::Tensor& tensor) const;
  // Says whether this rank has all elements of it.
  bool whole_here(const Parameter& row) const;
  // Says the same of a tensor; true for one that is not the model's.
  bool whole_here(const at::Tensor& tensor) const;
  // Says whether each rank has all of the model; alike on all ranks.
  bool whole_everywhere() const;

 private:
  std::vector<Parameter> all_;
  base::Partition here_;
  int partitions_;
  Slice slice_;
  std::unordered_map<const void*, std::size_t> by_tensor_;  // by TensorImpl
  std::unordered_map<std::string_view, std::size_t> by_name_;
  std::unordered_map<const void*, std::size_t> sharers_;  // by TensorImpl
};

}  // namespace lamina::model
