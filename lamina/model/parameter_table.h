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

namespace lamina::model {

// A parameter or buffer of the model: the holders of its elements, and the tensor that the user's code knows.
struct Parameter {
  layout::ParameterLayout layout;
  at::Tensor tensor;
};

// The layout of a tensor that one partition holds whole, its gradient the mean over so many replicas. Throws
// base::UsageError for a dtype that layouts do not know.
Parameter whole_in(base::Partition partition, std::string name, const at::Tensor& tensor, bool buffer, int replicas);

// [Note: parameter table] The one place where it stands who holds what of the model. Whoever moves, reduces, updates,
// saves or measures parameters reads it; a face makes it when the model is cut, and again where its user has put other
// tensors in the places of some. Parameters come before buffers, each tensor once, in the model's order, which is the
// same on all ranks.
class ParameterTable {
 public:
  // `here`: this rank's partition, of so many. Throws base::UsageError where a name or a tensor is given twice.
  ParameterTable(std::vector<Parameter> all, base::Partition here, int partitions);

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
  std::unordered_map<const void*, std::size_t> by_tensor_;  // by TensorImpl
  std::unordered_map<std::string_view, std::size_t> by_name_;
  std::unordered_map<const void*, std::size_t> sharers_;  // by TensorImpl
};

// Says whether the elements of a parameter may be shared out: of floating-point numbers, at least `threshold` of them,
// contiguous, and no scalar, whose states nothing would tell from other numbers.
bool may_be_sharded(const at::Tensor& parameter, std::int64_t threshold);

}  // namespace lamina::model
