// SPDX-License-Identifier: Apache-2.0
#include "lamina/job_checkpoint/save_list.h"

#include <ATen/ops/empty.h>

#include <cstring>

#include "lamina/base/error.h"
#include "lamina/base/str.h"
#include "lamina/checkpoint/tree_json.h"

namespace lamina::job_checkpoint {

using archive::Kind;
using archive::SavedTensor;

std::string content_name(std::size_t number) { return base::str("content/", number); }

void SaveList::add_row(const std::string& name, const at::Tensor& elements, std::vector<std::string> also) {
  const auto* row = parts_.table().find(name);
  base::internal_check(row != nullptr, "a part of no row");
  SavedTensor tensor;
  tensor.name = name;
  tensor.kind = row->layout.buffer ? Kind::kBuffer : Kind::kParameter;
  tensor.also = std::move(also);
  add(std::move(tensor), parts_.of_row(*row), elements);
}

void SaveList::add_state(const LocalParameters& locals, const StateName& of, const at::Tensor& local,
                         const at::Tensor& value) {
  SavedTensor tensor;
  tensor.name = of.parameter;
  tensor.kind = of.state.empty() ? Kind::kMaster : Kind::kState;
  tensor.optimizer = of.optimizer;
  tensor.state = of.state;
  add(std::move(tensor),
      of.state.empty() ? parts_.of_local(local, of.parameter)
                       : parts_.of_state(locals, local, of.parameter, value.sizes()),
      value);
}

void SaveList::add_content(const std::string& name, const at::Tensor& value) {
  to_write_.push_back(checkpoint::whole_part(name, Kind::kContent, value));
}

void SaveList::add_tree(const std::string& name, const value::Value& tree) {
  std::vector<at::Tensor> tensors;
  const auto text = checkpoint::to_json(tree, tensors, /*allow_objects=*/false).dump();
  auto bytes = at::empty({static_cast<std::int64_t>(text.size())}, at::kByte);
  std::memcpy(bytes.data_ptr(), text.data(), text.size());
  add_content(name, bytes);
  for (std::size_t i = 0; i < tensors.size(); ++i) add_content(base::str(name, "/", i), tensors[i]);
}

void SaveList::add(SavedTensor tensor, Parts::Piece piece, const at::Tensor& elements) {
  tensor.shape = std::move(piece.shape);
  tensor.dtype = checkpoint::savable_dtype(elements, archive::describe(tensor));
  if (!piece.writes && has_ == Has::kWritten) return;
  (piece.writes ? to_write_ : others_)
      .push_back({std::move(tensor), std::move(piece.region), checkpoint::memory_of(elements)});
}

}  // namespace lamina::job_checkpoint
