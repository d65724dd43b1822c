// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <span>
#include <vector>

#include "lamina/archive/manifest.h"
#include "lamina/layout/parameter_layout.h"

// Tensors that several files have parts of.
namespace lamina::foreign {

// Parts that ranks have of one tensor in one dimension, one behind the other; the last ones may be padded. Throws
// base::FormatError for others.
archive::SavedTensor joined(const std::vector<archive::SavedTensor>& parts, const layout::Shape& shape);

// Adds what a file has of a slice, or the ranks' parts of it, one behind the other: false where these are not its
// elements. Ranks may have all of it each.
bool add_slice(archive::SavedTensor& whole, const layout::Slicing& slicing, int slice,
               std::span<const archive::SavedTensor> parts);

// A tensor for each name: states of several parameters may be one.
std::vector<archive::SavedTensor> by_name(const std::vector<archive::SavedTensor>& tensors);

}  // namespace lamina::foreign
