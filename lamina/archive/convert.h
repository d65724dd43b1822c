// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "lamina/archive/merge.h"
#include "lamina/archive/torch_file.h"

namespace lamina::archive {

// Saves tensors that others wrote as a checkpoint's parameters. Only names that begin with `prefix` are saved, without
// it. `id` is no other save's. Throws base::UsageError where none does, where the tag is there already or elements have
// no place in a safetensors file, and base::FormatError where a tensor's parts do not make it.
Found convert(FileSystem& files, const ForeignCheckpoint& from, const std::string& prefix, const Path& to,
              const std::string& tag, const std::string& id, const MergeProgress& progress);

}  // namespace lamina::archive
