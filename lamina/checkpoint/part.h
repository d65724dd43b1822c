// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "lamina/archive/manifest.h"
#include "lamina/layout/region.h"

namespace lamina::checkpoint {

// [Note: parts] Everything that is saved is a tensor with a name, of which each rank has a *part*: the elements of a
// region, in memory of its own. A parameter's or buffer's region is the one of the parameter table. A master, or a
// state that is like its parameter, has the region of the elements that the optimizer updates. A tensor of another
// shape is whole wherever it is. One of all ranks that have the same part writes it, and every one reads it.
struct Part {
  archive::SavedTensor tensor;  // without pieces
  layout::Region region;
  at::Tensor elements;  // contiguous: region.size of them, of which the first region.end - region.begin count
};

// The part that is a whole tensor: of a shape of its own. Throws base::UsageError, which names it, for one that has no
// place in a checkpoint: sparse, quantised, a subclass's, or of a dtype that safetensors does not know.
Part whole_part(std::string name, archive::Kind kind, const at::Tensor& tensor);

// Contiguous memory with the elements of a tensor, its own where that is such.
at::Tensor memory_of(const at::Tensor& tensor);

// Throws base::UsageError as whole_part() does; `name` is for the message.
layout::DType savable_dtype(const at::Tensor& tensor, const std::string& name);

// The elements of a region that count, and their bytes.
inline std::int64_t count(const layout::Region& region) { return region.end - region.begin; }
std::int64_t size_bytes(const Part& part);

// Elements [begin, end) of a region's, as a region of their own.
layout::Region within(layout::Region region, std::int64_t begin, std::int64_t end);

at::ScalarType scalar_type(layout::DType dtype);

}  // namespace lamina::checkpoint
