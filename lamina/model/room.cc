// SPDX-License-Identifier: Apache-2.0
#include "lamina/model/room.h"

#include <ATen/ops/empty_strided.h>

#include "lamina/base/str.h"
#include "lamina/device/rank_device.h"
#include "lamina/value/released.h"
#include "lamina/value/slice_shapes.h"

namespace lamina::model {

void put_aside(const ParameterTable& table, const std::string& why) {
  for (const auto& row : table.all()) {
    at::Tensor tensor = row.tensor;
    value::release(tensor, base::str(row.layout.name, why));
    if (row.layout.slicing) value::become_whole(tensor, row.layout.shape);
  }
}

void make_room(const ParameterTable& table, std::span<const Parameter> rows) {
  for (const auto& row : rows) {
    at::Tensor tensor = row.tensor;
    if (!table.is_here(row) || !value::is_released(tensor)) continue;
    value::restore(tensor, at::empty_strided(tensor.sizes(), tensor.strides(),
                                             at::TensorOptions(tensor.dtype()).device(devices::rank_device())));
  }
}

}  // namespace lamina::model
