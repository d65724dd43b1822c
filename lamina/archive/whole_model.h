// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "lamina/archive/file_system.h"
#include "lamina/archive/manifest.h"

// Checkpoints as Hugging Face's libraries read them: each tensor of the model is whole in a file, and an index names
// it.
namespace lamina::archive {

inline constexpr auto kModelFile = "model.safetensors", kModelIndex = "model.safetensors.index.json";

// The index of a checkpoint's parameters and buffers, as text; "" where some of them is not whole in one file.
std::string model_index(const Manifest& manifest);

// Rewrites the parameters and buffers of a checkpoint that is being written, so that each is whole in one file of at
// most so many bytes (one tensor may have more). Returns the manifest of what is there then. A part of a tensor at a
// time is in memory; `went_on` is called between them, and may throw.
Manifest make_whole(FileSystem& files, const Path& folder, const Manifest& manifest, std::uint64_t most_file_bytes,
                    const std::function<void()>& went_on);

}  // namespace lamina::archive
