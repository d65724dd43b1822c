// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <span>

#include "lamina/fused/update.h"

namespace lamina::fused {

// Elements in memory, and their copies in half precision, which somebody may have written to.
struct Copied {
  float* elements = nullptr;
  layout::DType copy_dtype{};
  const void* copies = nullptr;
  std::size_t count = 0;
};

// Gives an element the value of its copy where somebody has written to the copy: where that is not the element,
// rounded.
void follow(std::span<const Copied> all, const Workers& workers);

}  // namespace lamina::fused
