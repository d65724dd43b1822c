// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include "lamina/job_checkpoint/job.h"
#include "lamina/job_checkpoint/reader.h"
#include "lamina/job_checkpoint/save_list.h"

namespace lamina::job_checkpoint {

// The states of a rank's random generators: the engine's, and those of the face. Content of a checkpoint under the
// rank's number, which no other rank has.
struct Generators {
  at::Tensor engine;
  value::Value face;
};

void add_generators(JobAccess& job, SaveList& list);
// Reads those of this rank where its layout is the checkpoint's, and none else.
std::optional<Generators> read_generators(const JobAccess& job, const Reader& reader, const About& about);
void set_generators(JobAccess& job, const Generators& states);

}  // namespace lamina::job_checkpoint
