// SPDX-License-Identifier: Apache-2.0
#include "lamina/session/parts_to_save.h"

#include "lamina/base/error.h"
#include "lamina/base/str.h"

namespace lamina::session {

using archive::Kind;
using archive::SavedTensor;

std::string content_name(std::size_t number) { return base::str("content/", number); }

void PartsToSave::add_row(const std::string& name, const at::Tensor& elements, std::vector<std::string> also) {
  const auto* row = parts_.table().find(name);
  base::internal_check(row != nullptr, "a part of no row");
  SavedTensor tensor;
  tensor.name = name;
  tensor.kind = row->layout.buffer ? Kind::kBuffer : Kind::kParameter;
  tensor.also = std::move(also);
  add(std::move(tensor), parts_.of_row(*row), elements);
}

void PartsToSave::add_state(const LocalParameters& locals, const StateName& of, const at::Tensor& place,
                            const at::Tensor& value) {
  SavedTensor tensor;
  tensor.name = of.parameter;
  tensor.kind = of.state.empty() ? Kind::kMaster : Kind::kState;
  tensor.optimizer = of.optimizer;
  tensor.state = of.state;
  add(std::move(tensor),
      of.state.empty() ? parts_.of_place(place, of.parameter)
                       : parts_.of_state(locals, place, of.parameter, value.sizes()),
      value);
}

void PartsToSave::add_content(const std::string& name, const at::Tensor& value) {
  to_write_.push_back(checkpoint::whole_part(name, Kind::kContent, value));
}

void PartsToSave::add(SavedTensor tensor, CheckpointParts::Place place, const at::Tensor& elements) {
  tensor.shape = std::move(place.shape);
  tensor.dtype = checkpoint::savable_dtype(elements, archive::describe(tensor));
  if (!place.writes) return;
  to_write_.push_back({std::move(tensor), std::move(place.region), elements.detach().contiguous()});
}

}  // namespace lamina::session
