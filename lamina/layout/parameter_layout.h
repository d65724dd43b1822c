// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "lamina/base/ids.h"
#include "lamina/layout/dtype.h"
#include "lamina/layout/region.h"

namespace lamina::layout {

// Positions along the sliced dimension that are divided apart from the others. Each slice gets
// ceil(extent / unit / degree) units, the last ones fewer or none.
struct Section {
  std::int64_t extent = 0;
  std::int64_t unit = 1;  // is never torn: the size of an attention head, say

  friend bool operator==(const Section&, const Section&) = default;
};

// A tensor cut along one dimension, for tensor parallelism.
struct Slicing {
  int dim = 0;
  std::vector<Section> sections;  // together all of the dimension: one, or three where q, k and v lie side by side
  int degree = 1;                 // how many slices there are
  bool padded = false;            // all slices have the shape of the first

  friend bool operator==(const Slicing&, const Slicing&) = default;
};

// [Note: layout] A parameter or buffer and which elements of it are where. It is cut three times. A partition has all
// of it or nothing. Slicing cuts it along a dimension into slices. A slice, flattened, is cut into shards (`share_of`),
// the last ones padded. The result is a piece for each slice and shard: all pieces together have
// every element exactly once. Each is held by one or more ranks of the partition, see `place`. Masters and states of
// optimizers have layouts of their own, which may differ in their shards.
struct ParameterLayout {
  std::string name;  // the model's: "h.0.attn.c_attn.weight"
  Shape shape;       // of the whole
  bool buffer = false;
  base::Partition partition;
  std::optional<Slicing> slicing;
  int shards = 1;
  DType dtype = DType::kFloat32;

  int slices() const { return slicing ? slicing->degree : 1; }

  friend bool operator==(const ParameterLayout&, const ParameterLayout&) = default;
};

// Throws ConfigError, which names the layout and all that is wrong with it. The functions below do so first.
void check(const ParameterLayout& layout);

// The piece of one slice and shard. Throws UsageError when there is no such one.
Region held(const ParameterLayout& layout, int slice, int shard);

}  // namespace lamina::layout
