// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>

#include "lamina/fused/vectors.h"
#include "lamina/layout/dtype.h"

namespace lamina::fused {

// Reads `count` elements of `dtype` into T, the type that they are computed in.
template <class T>
void load(layout::DType dtype, const void* memory, std::size_t begin, std::size_t count, T* out, Vectors vectors);

// Writes them in `dtype`, rounded to the nearest.
template <class T>
void store(const T* values, layout::DType dtype, void* memory, std::size_t begin, std::size_t count, Vectors vectors);

}  // namespace lamina::fused
