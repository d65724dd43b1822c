// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <filesystem>
#include <memory>
#include <optional>
#include <string>

#include "lamina/job_checkpoint/job.h"
#include "lamina/job_checkpoint/saves.h"

namespace lamina::job_checkpoint {

struct ResumeOptions {
  std::filesystem::path folder;              // of the checkpoints; where a whole model is meant, or the model itself
  std::optional<std::string> tag;            // none: the newest, or where that is damaged, the latest that is whole
  bool partial = true;                       // false: a whole model, of which optimizers get nothing
  bool strict = true;                        // in the names of parameters and buffers; else what is left out is told
  bool load_optimizer = true;                // states of optimizers, masters and the loss scale
  bool load_sharded_optimizer_state = true;  // false: where parameters are sharded, masters and the loss scale alone
  bool verify = true;                        // compares all that is read with its checksums
  bool allow_objects = false;                // of classes that are no plain data
  bool translate = false;                    // a whole model is given to JobAccess::load_translated()
  bool missing_ok = false;                   // where there is no such checkpoint nothing is loaded, which a line says
};

// Loads a checkpoint into a job, outside of steps, or has it wait for the cut of the job's model: collective over the
// world, whose ranks have compared their arguments. Nothing is changed on any rank unless all of it fits on all.
//
// Throws, on every rank alike: base::UsageError where there is no such checkpoint and where something does not fit;
// base::FormatError, which names file and tensor, where it is damaged; base::FileError where it cannot be read.
void resume_job(const std::shared_ptr<JobAccess>& job, Saves& saves, const ResumeOptions& options);

}  // namespace lamina::job_checkpoint
