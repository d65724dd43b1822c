// SPDX-License-Identifier: Apache-2.0
#include "lamina/layout/region.h"

#include <algorithm>

#include "lamina/base/error.h"
#include "lamina/base/str.h"

namespace lamina::layout {

std::int64_t numel(const Shape& shape) {
  std::int64_t strides = 1;
  std::int64_t count = 1;
  for (std::int64_t size : shape) {
    if (size < 0) throw base::ConfigError(base::str("a tensor with a dimension of size ", size, " is not possible"));
    const std::int64_t factor = std::max<std::int64_t>(size, 1);
    if (factor > kMostElements / strides)
      throw base::ConfigError("a tensor of more than 2^60 elements is not possible");
    strides *= factor;
    count *= size;
  }
  return count;
}

Region whole(const Shape& shape) {
  const std::int64_t count = numel(shape);
  const std::int64_t extent = shape.empty() ? 1 : shape.front();
  Region all{.whole = shape, .extent = extent, .end = count, .size = count};
  if (extent > 0) all.stripes = {{0, 0, extent}};
  return all;
}

}  // namespace lamina::layout
