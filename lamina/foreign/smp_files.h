// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <compare>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "lamina/archive/file_system.h"

// Files of a partial checkpoint in the form of smdistributed.modelparallel, by their names. Each rank has written some,
// whose numbers are its places along axes of the job: the partition, the slice, the copy.
namespace lamina::foreign {

inline constexpr std::string_view kModels = "model_", kOptimizers = "optimizer_", kPrecisions = "fp16_states_";

// "optimizer_0_0_1.pt" has the numbers 0, 0, 1.
struct SmpFile {
  std::vector<std::int64_t> numbers;
  std::string name;

  int slice() const { return numbers.size() > 1 ? static_cast<int>(numbers[1]) : 0; }
  auto operator<=>(const SmpFile&) const = default;
};

// Picks the files of a prefix among the names of all, in the order of their numbers.
std::vector<SmpFile> files_with(const std::vector<std::string>& names, std::string_view prefix);

// Throws base::FormatError where a place along an axis has no file.
void require_each(const archive::Path& folder, std::string_view prefix, const std::vector<SmpFile>& files);

// Throws base::FormatError where these files are not of the same ranks.
void require_alike(const archive::Path& folder, const std::vector<SmpFile>& models,
                   const std::vector<SmpFile>& optimizers, const std::vector<SmpFile>& precisions);

}  // namespace lamina::foreign
