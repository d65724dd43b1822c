// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <filesystem>
#include <memory>
#include <string>

#include "lamina/job_checkpoint/job.h"
#include "lamina/job_checkpoint/saves.h"

namespace lamina::job_checkpoint {

struct SaveOptions {
  std::filesystem::path folder;  // of the checkpoints
  std::string tag;
  bool partial = true;   // false: the model alone, each tensor as a whole
  std::size_t keep = 0;  // so many partial checkpoints stay; 0: all
  bool asynchronous = false;
  bool allow_objects = false;  // of classes that are no plain data
};

// [Note: job checkpoints] A checkpoint of a job is a folder that is there as a whole or not at all; its format stands
// in lamina/archive. Each rank writes the elements that are its own, once, and what it alone has: its generators. Any
// layout loads what any other has saved. A face lends the job, and does nothing of this itself.

// Begins to save a job, outside of steps: collective over the world, whose ranks have compared their arguments. One
// that is not asynchronous has ended well when this returns. Throws the same on all ranks, before a byte of a tensor is
// written, where a rank cannot save.
std::shared_ptr<checkpoint::Save> save_job(JobAccess& job, Saves& saves, const SaveOptions& options);

}  // namespace lamina::job_checkpoint
