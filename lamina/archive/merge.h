// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <optional>

#include "lamina/archive/safetensors.h"
#include "lamina/archive/store.h"
#include "lamina/layout/dtype.h"

namespace lamina::archive {

using MergeProgress = std::function<void(std::uint64_t, std::uint64_t)>;  // bytes so far, of all

struct MergeOptions {
  std::optional<layout::DType> dtype;              // of all floating elements; none: as they are
  std::uint64_t most_file_bytes = kMostFileBytes;  // of elements; a tensor that is larger has a file of its own
};

struct Merged {
  std::size_t files = 0;
  std::size_t tensors = 0;
  std::uint64_t bytes = 0;      // of elements
  std::uint64_t too_large = 0;  // finite elements that `dtype` has no number for, and that are infinite there
};

// Writes the parameters and buffers of a checkpoint as a folder that Hugging Face's libraries load:
// `model.safetensors`, or `model-00001-of-00003.safetensors` and so on beside `model.safetensors.index.json`, and the
// checkpoint's files that hold no tensors (`config.json`). Names are changed by the pairs of prefixes in the manifest's
// `translations`, the first one that fits; a tied tensor has its first name only. `place` appears whole, or not at all.
// Takes some parts of a tensor in memory, never a whole one.
//
// Throws base::UsageError where the checkpoint has no model, two tensors would have one name, `dtype` is no floating
// one of 16 or 32 bits or `place` is there, and base::FormatError where the checkpoint is damaged.
Merged merge(FileSystem& files, const Found& from, const Path& place, const MergeOptions& options,
             const MergeProgress& progress);

// The name there of a tensor that is called so here.
std::string translated(const std::string& name, const nlohmann::json& about);

}  // namespace lamina::archive
