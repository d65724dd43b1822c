// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "lamina/archive/merge.h"
#include "lamina/foreign/torch_file.h"

namespace lamina::foreign {

// Saves tensors that others wrote as a checkpoint's parameters. Only names that begin with `prefix` are saved, without
// it. `id` is no other save's. Throws base::UsageError where none does, where the tag is there already or elements have
// no place in a safetensors file, and base::FormatError where a tensor's parts do not make it.
archive::Found convert(archive::FileSystem& files, const ForeignCheckpoint& from, const std::string& prefix,
                       const archive::Path& to, const std::string& tag, const std::string& id,
                       const archive::MergeProgress& progress);

}  // namespace lamina::foreign
