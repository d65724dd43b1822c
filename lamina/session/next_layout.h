// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "lamina/session/change.h"

namespace lamina::session {

// The configuration in which so many ranks of a job go on. It is the first of `layouts`, objects of keys as change()
// has them, that fits them. Else the model is in as many parts as the program has asked for, and has fewer copies, or
// more. Else the number of its parts, partitions times slices times shards, is the nearest that fits. Of several such
// layouts it is the one whose number of partitions is, then that of slices. One partition stays one, and so do whole
// layers. Alike on all ranks that ask. Throws base::ConfigError, which says why, where none fits.
config::Config next_layout(Session& before, int ranks, const std::vector<std::string>& layouts, const ChangingJob& job);

// Throws base::UsageError or base::ConfigError, on all ranks, for layouts that are none of any number of ranks up to
// those there are, and where ranks give others; collective over the world. `of_copies`: they may be of copies alone.
void require_layouts(Session& session, const std::vector<std::string>& layouts, bool of_copies = false);

}  // namespace lamina::session
