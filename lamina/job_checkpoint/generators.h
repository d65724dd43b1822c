// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <utility>
#include <vector>

#include "lamina/job_checkpoint/job.h"
#include "lamina/job_checkpoint/reader.h"
#include "lamina/job_checkpoint/save_list.h"

namespace lamina::job_checkpoint {

// The states of a rank's random generators: torch's of the host and of the rank's device, and those of the face.
// Content of a checkpoint under the rank's number, which no other rank has.
void add_generators(JobAccess& job, SaveList& list);

// States in a checkpoint of this rank's generators: none where the layouts differ, and none of a device where the
// checkpoint is of ranks with devices of another type.
class SavedGenerators {
 public:
  // Reads them, and the face takes its own. Throws base::FormatError for what is no state of one.
  SavedGenerators(JobAccess& job, const Reader& reader, const About& about);

  // Has the job's go on from them.
  void set(JobAccess& job) const;

 private:
  bool are_there_ = false;
  std::vector<std::pair<at::Generator, at::Tensor>> states_;
};

}  // namespace lamina::job_checkpoint
