// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "lamina/archive/file_system.h"
#include "lamina/archive/manifest.h"

// Folders of models as Hugging Face's libraries write and read them: `model.safetensors`, or several such files and an
// index of their tensors; in older ones `pytorch_model.bin` in its place, a file of torch.save.
namespace lamina::archive {

inline constexpr auto kModelFile = "model.safetensors", kModelIndex = "model.safetensors.index.json";

// The index of a checkpoint's parameters and buffers, as text; "" where some of them is not whole in one file.
std::string model_index(const Manifest& manifest);

bool is_model_folder(FileSystem& files, const Path& folder);
// The tensors of such a folder, as a manifest without checksums has them. Throws base::FormatError, which names the
// file, for what is none: tensors that the index names and the files have not, names that leave the folder. With
// `verify` that share of what files have checksums of in themselves is compared.
Manifest read_model_folder(FileSystem& files, const Path& folder, std::optional<Share> verify);
// A file of torch.save with the state dict of a model, in the same way; it lies in the folder that the path names.
Manifest read_model_file(FileSystem& files, const Path& path, std::optional<Share> verify);

// Rewrites the parameters and buffers of a checkpoint that is being written, so that each is whole in one file of at
// most so many bytes (one tensor may have more). Returns the manifest of what is there then. A part of a tensor at a
// time is in memory; `went_on` is called between them, and may throw.
Manifest make_whole(FileSystem& files, const Path& folder, const Manifest& manifest, std::uint64_t most_file_bytes,
                    const std::function<void()>& went_on);

}  // namespace lamina::archive
