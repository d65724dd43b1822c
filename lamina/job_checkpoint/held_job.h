// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "lamina/checkpoint/held_pieces.h"
#include "lamina/job_checkpoint/about.h"
#include "lamina/job_checkpoint/job.h"
#include "lamina/job_checkpoint/resumption.h"

namespace lamina::job_checkpoint {

// A job in the memory of its ranks, while it changes its layout: see [Note: held pieces].
struct HeldJob {
  About about;  // alike on all ranks
  std::shared_ptr<checkpoint::HeldPieces> pieces;
};

// Throws base::UsageError, on all ranks, where something of a job whose model is cut cannot go into another layout, or
// not now: gradients that wait, say. Collective over the world.
void require_changeable(const JobAccess& job);

// Lists what the ranks hold of a job whose model is cut, and keeps its memory; collective over the world. Throws
// base::UsageError, on all ranks, where something cannot be held, or nobody knows the whole of an optimizer's groups.
HeldJob hold_job(JobAccess& job);

// Makes it a checkpoint that waits for the cut of the same model in another layout.
std::shared_ptr<Resumption> resumption_of(const HeldJob& held, std::shared_ptr<JobAccess> job);

}  // namespace lamina::job_checkpoint
