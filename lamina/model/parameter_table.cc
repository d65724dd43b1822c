// SPDX-License-Identifier: Apache-2.0
#include "lamina/model/parameter_table.h"

#include <algorithm>

#include "lamina/base/error.h"
#include "lamina/base/str.h"
#include "lamina/model/overlaps.h"
#include "lamina/value/dtype.h"

namespace lamina::model {
namespace {

using layout::DType;

DType dtype_of(const std::string& name, const at::Tensor& tensor) {
  if (const auto dtype = value::dtype_of(tensor.scalar_type())) return *dtype;
  throw base::UsageError(base::str(name, " has the dtype ", tensor.scalar_type(),
                                   ", which lamina cannot spread over ranks: keep it in another dtype, or in an "
                                   "attribute that is neither a parameter nor a buffer"),
                         base::Code{"model-dtype"});
}

}  // namespace

Parameter whole_in(base::Partition partition, std::string name, const at::Tensor& tensor, bool buffer, int replicas) {
  layout::ParameterLayout layout;
  layout.dtype = dtype_of(name, tensor);
  layout.name = std::move(name);
  layout.shape = tensor.sizes().vec();
  layout.buffer = buffer;
  layout.partition = partition;
  return {layout, layout, {.divisor = replicas}, tensor};
}

void slice(Parameter& row, const layout::Slicing& slicing) {
  for (auto* layout : {&row.layout, &row.update}) {
    layout->slicing = slicing;
    auto& extent = layout->shape.at(static_cast<std::size_t>(slicing.dim));
    extent = 0;
    for (const auto& section : slicing.sections) extent += section.extent;
  }
  row.reduction.over = topology::kSameParts;
  layout::check(row.layout);
}

ParameterTable::ParameterTable(std::vector<Parameter> all, base::Partition here, int partitions, Slice slice)
    : all_(std::move(all)), here_(here), partitions_(partitions), slice_(slice) {
  for (std::size_t i = 0; i < all_.size(); ++i) {
    const auto& name = all_[i].layout.name;
    const bool is_new =
        by_name_.emplace(name, i).second && by_tensor_.emplace(all_[i].tensor.unsafeGetTensorImpl(), i).second;
    if (!is_new) throw base::InternalError(base::str(name, " is in the model's table already"));
  }
  std::vector<at::Tensor> tensors;
  for (const auto& row : all_) tensors.push_back(row.tensor);
  for (const auto& group : overlaps(tensors)) {
    for (const auto i : group) sharers_[tensors[i].unsafeGetTensorImpl()] = i == group[0] ? group[1] : group[0];
  }
}

std::vector<const Parameter*> ParameterTable::here() const {
  std::vector<const Parameter*> rows;
  for (const auto& row : all_) {
    if (is_here(row)) rows.push_back(&row);
  }
  return rows;
}

const Parameter* ParameterTable::find(const at::Tensor& tensor) const {
  const auto found = by_tensor_.find(tensor.unsafeGetTensorImpl());
  return found == by_tensor_.end() ? nullptr : &all_[found->second];
}

const Parameter* ParameterTable::sharer(const at::Tensor& tensor) const {
  const auto found = sharers_.find(tensor.unsafeGetTensorImpl());
  return found == sharers_.end() ? nullptr : &all_[found->second];
}

std::vector<const Parameter*> ParameterTable::find_with_gradients(std::span<const at::Tensor> tensors) const {
  std::unordered_map<const void*, const Parameter*> by_gradient;
  for (const auto& row : all_) {
    if (row.tensor.grad().defined()) by_gradient[row.tensor.grad().unsafeGetTensorImpl()] = &row;
  }
  std::vector<const Parameter*> rows;
  for (const auto& tensor : tensors) {
    const auto found = by_gradient.find(tensor.unsafeGetTensorImpl());
    rows.push_back(found == by_gradient.end() ? find(tensor) : found->second);
  }
  return rows;
}

const Parameter* ParameterTable::find(std::string_view name) const {
  const auto found = by_name_.find(name);
  return found == by_name_.end() ? nullptr : &all_[found->second];
}

bool ParameterTable::is_here(const at::Tensor& tensor) const {
  const Parameter* row = find(tensor);
  return row == nullptr || is_here(*row);
}

bool ParameterTable::whole_here(const Parameter& row) const {
  return is_here(row) && row.layout.slices() == 1 && row.layout.shards == 1;
}

bool ParameterTable::whole_here(const at::Tensor& tensor) const {
  const Parameter* row = find(tensor);
  return row == nullptr || whole_here(*row);
}

bool ParameterTable::whole_everywhere() const {
  return partitions_ == 1 && std::ranges::all_of(all_, [&](const Parameter& row) { return whole_here(row); });
}

}  // namespace lamina::model
