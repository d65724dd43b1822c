// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string_view>
#include <unordered_map>

#include "lamina/layout/place.h"
#include "lamina/model/parameter_table.h"
#include "lamina/topology/topology.h"

namespace lamina::checkpoint {

// Says who writes what several ranks have: of each parameter of the model the pieces of one copy, and with them its
// states, so that all copies write about as many bytes. Alike on all ranks. Buffers, which copies may have different
// values of, are those of the first.
class Writers {
 public:
  Writers(const model::ParameterTable& table, const topology::Topology& topology);

  // The copy, as layout::Place counts them, that writes what belongs to a row, of those that this layout of it has: the
  // row's own, or that of what is updated.
  int copy_of(const layout::ParameterLayout& layout, const topology::Topology& topology) const {
    return copies_.at(layout.name) % layout::copies(layout, topology);
  }

 private:
  std::unordered_map<std::string_view, int> copies_;
};

}  // namespace lamina::checkpoint
