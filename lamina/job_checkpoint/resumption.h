// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <vector>

#include "lamina/job_checkpoint/job.h"
#include "lamina/job_checkpoint/optimizer_states.h"
#include "lamina/job_checkpoint/reader.h"

namespace lamina::job_checkpoint {

// A checkpoint that is loaded into a job: at once, or when its model is cut.
class Resumption {
 public:
  // The job has a model. `load_optimizer`: states, masters and the loss scale, too.
  Resumption(std::shared_ptr<JobAccess> job, std::shared_ptr<Reader> reader, About about, bool strict,
             bool load_optimizer)
      : job_(std::move(job)),
        reader_(std::move(reader)),
        about_(std::move(about)),
        strict_(strict),
        load_optimizer_(load_optimizer) {}

  // The partition that was saved, where the job has as many; else of no module.
  plan::KeptPartition partition() const;
  // Throws base::UsageError where the checkpoint does not fit the model and the optimizers.
  void check() const;
  // Loads it into a model that is cut; collective over the world. Nothing is changed where that fails on a rank.
  void load();
  // Has the counters of the job go on where they were.
  void go_on() const;

 private:
  void want_model(const Parts& parts);

  const std::shared_ptr<JobAccess> job_;
  const std::shared_ptr<Reader> reader_;
  const About about_;
  const bool strict_, load_optimizer_;
};

}  // namespace lamina::job_checkpoint
