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
namespace lamina::foreign {

bool is_model_folder(archive::FileSystem& files, const archive::Path& folder);
// The tensors of such a folder, as a manifest without checksums has them. Throws base::FormatError, which names the
// file, for what is none: tensors that the index names and the files have not, names that leave the folder. With
// `verify` that share of what files have checksums of in themselves is compared.
archive::Manifest read_model_folder(archive::FileSystem& files, const archive::Path& folder,
                                    std::optional<archive::Share> verify);
// A file of torch.save with the state dict of a model, in the same way; it lies in the folder that the path names.
archive::Manifest read_model_file(archive::FileSystem& files, const archive::Path& path,
                                  std::optional<archive::Share> verify);

}  // namespace lamina::foreign
