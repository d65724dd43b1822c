// SPDX-License-Identifier: Apache-2.0
#include "lamina/job_checkpoint/job.h"

#include "lamina/base/error.h"
#include "lamina/base/str.h"

namespace lamina::job_checkpoint {

void require_model(bool has_model, const std::string& call) {
  if (has_model) return;
  throw base::UsageError(base::str(call, ": there is no DistributedModel yet: make model and optimizers first"),
                         base::Code{"checkpoint-no-model"});
}

void require_ready(const JobAccess& job) {
  require_model(job.has_model(), "save_checkpoint()");
  if (!job.is_cut()) {
    throw base::UsageError(
        "save_checkpoint() before the model is partitioned, which its first step does: there is nothing yet that its "
        "initial values do not say",
        base::Code{"state-before-cut"});
  }
  if (job.accumulates()) {
    throw base::UsageError(
        "save_checkpoint() between the backward passes of one reduction (backward_passes_per_step): gradients that a "
        "checkpoint does not have would be lost. Save after the pass in which they are averaged",
        base::Code{"checkpoint-accumulates"});
  }
}

}  // namespace lamina::job_checkpoint
