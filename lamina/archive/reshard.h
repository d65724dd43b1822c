// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "lamina/archive/merge.h"
#include "lamina/archive/store.h"

namespace lamina::archive {

// Writes the tensors of a checkpoint anew, each cut into as many equal shards as there are `writers`, and saves that
// under the same tag in another folder of checkpoints. `id` is no other save's. Throws base::UsageError where `writers`
// is not from 1 to 10,000, where the tag is there already, and base::FormatError where the checkpoint is damaged.
Found reshard(FileSystem& files, const Found& from, const Path& to, std::size_t writers, const std::string& id,
              const MergeProgress& progress);

}  // namespace lamina::archive
