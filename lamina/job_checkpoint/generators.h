// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include "lamina/job_checkpoint/job.h"
#include "lamina/job_checkpoint/reader.h"
#include "lamina/job_checkpoint/save_list.h"

namespace lamina::job_checkpoint {

// The states of a rank's random generators: the engine's, and those of the face. Content of a checkpoint under the
// rank's number, which no other rank has.
void add_generators(JobAccess& job, SaveList& list);

// States in a checkpoint of this rank's generators: none where the layouts differ.
class SavedGenerators {
 public:
  // Reads them, and the face takes its own. Throws base::FormatError for what is no state of one.
  SavedGenerators(JobAccess& job, const Reader& reader, const About& about);

  // Has the job's go on from them.
  void set(JobAccess& job) const;

 private:
  bool are_there_ = false;
  at::Tensor engine_;
};

}  // namespace lamina::job_checkpoint
