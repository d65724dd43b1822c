// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "lamina/archive/merge.h"
#include "lamina/archive/store.h"

namespace lamina::archive {

// One thing in which two checkpoints differ.
struct Difference {
  std::string what;               // "h.0.weight", "exp_avg of h.0.weight", "about/counters/step"
  std::string how;                // a clause: "only in the first", "shape (4, 6) and (4, 8)", "3 of 24 elements"
  std::uint64_t elements = 0;     // whose bytes differ, where values were compared
  std::optional<double> largest;  // difference of two of them, where they are floating and of one dtype; NaN with a NaN
};

// Tensors by name, kind and state: those that only one has, other dtypes, shapes or values; then what else the
// manifests say, but for the time of the save. How they are cut into files is no difference. Reads both by parts.
// Throws base::FormatError where one is damaged.
std::vector<Difference> diff(FileSystem& files, const Found& one, const Found& other, const MergeProgress& progress);

}  // namespace lamina::archive
