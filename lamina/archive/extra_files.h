// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "lamina/archive/store.h"

namespace lamina::archive {

// Copies what a checkpoint has beside its tensors (`config.json`) into a folder, checked as it is read, but for the
// index of its own files. Returns the files, as a manifest lists them.
std::vector<DataFile> copy_extra_files(FileSystem& files, const Found& from, const Path& to);

}  // namespace lamina::archive
