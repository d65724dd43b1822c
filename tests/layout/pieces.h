// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "lamina/layout/parameter_layout.h"

namespace lamina::layout {

struct Piece {
  int slice = 0;
  int shard = 0;
  Region region;
};

// All pieces of a layout, slice by slice.
inline std::vector<Piece> pieces(const ParameterLayout& layout) {
  check(layout);
  std::vector<Piece> all;
  for (int slice = 0; slice < layout.slices(); ++slice) {
    for (int shard = 0; shard < layout.shards; ++shard) all.push_back({slice, shard, held(layout, slice, shard)});
  }
  return all;
}

}  // namespace lamina::layout
