// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "lamina/collective/ranks.h"
#include "lamina/distributed_optimizer/optimizer.h"
#include "lamina/job_checkpoint/job.h"
#include "lamina/verification/run_recorder.h"

// A job in the recording of a run: the same tensors, under the same names, as in its checkpoint.
namespace lamina::job_checkpoint {

// Records the parts of the model that this rank has, what its optimizers have made of them, and the generators of the
// rank that leads. A job that is not cut has none.
void record_state(JobAccess& job, verification::RunRecorder& recorder);

// Has the gradients recorded that the optimizer updates with, from now on.
void record_updates(distributed_optimizer::Optimizer& optimizer, const collective::Ranks& ranks,
                    std::shared_ptr<verification::RunRecorder> recorder);
// Records those of the model's parameters, as an optimizer that is not the job's is about to use them.
void record_gradients(JobAccess& job, verification::RunRecorder& recorder);

}  // namespace lamina::job_checkpoint
