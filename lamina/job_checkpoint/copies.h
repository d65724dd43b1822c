// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "lamina/job_checkpoint/job.h"

namespace lamina::job_checkpoint {

// Compares the parameters that are not sliced, of which each rank of a TP_GROUP has a copy: collective over the world.
// Throws base::DesyncError, on all, where a bit differs, with the parameter and the rank; a checkpoint has the values
// of one of them.
void require_same_copies(const JobAccess& job);

}  // namespace lamina::job_checkpoint
