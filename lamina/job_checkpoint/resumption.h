// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "lamina/job_checkpoint/job.h"
#include "lamina/job_checkpoint/optimizer_states.h"
#include "lamina/job_checkpoint/reader.h"

namespace lamina::job_checkpoint {

// How much is loaded of optimizers: masters come with the loss scale, states with the options of groups.
enum class OfOptimizers { kNothing, kMasters, kAll };

// A checkpoint that is loaded into a job: at once, or when its model is cut.
class Resumption {
 public:
  // The job has a model.
  Resumption(std::shared_ptr<JobAccess> job, std::shared_ptr<Reader> reader, About about, bool strict,
             OfOptimizers wanted)
      : job_(std::move(job)),
        reader_(std::move(reader)),
        about_(std::move(about)),
        strict_(strict),
        of_optimizers_(wanted) {}

  // Makes it one of a job that goes on in the place of this one, before that is cut.
  std::shared_ptr<Resumption> for_job(std::shared_ptr<JobAccess> job) const {
    auto same = std::make_shared<Resumption>(std::move(job), reader_, about_, strict_, of_optimizers_);
    same->have_options_ = have_options_;
    return same;
  }

  bool has_optimizers() const { return of_optimizers_ != OfOptimizers::kNothing; }
  // The partition that was saved, where the job has as many; else of no module.
  plan::KeptPartition partition() const;
  // Throws base::UsageError where the checkpoint does not fit the model and the optimizers.
  void check() const;
  // Loads the options of optimizers, before the model is cut: load() leaves them as they are then.
  void load_options();
  // Leaves the options of optimizers as they are when load() is called: they are the very ones that were saved.
  void keep_options();
  // Loads it into a model that is cut; collective over the world. Nothing is changed where that fails on a rank.
  void load();
  // Has the counters of the job go on where they were.
  void go_on() const;

 private:
  void want_model(const Parts& parts);

  const std::shared_ptr<JobAccess> job_;
  const std::shared_ptr<Reader> reader_;
  About about_;
  const bool strict_;
  const OfOptimizers of_optimizers_;
  std::vector<bool> have_options_;  // of the optimizers
};

// Where one waits for the cut of the model: throws base::UsageError for a call that would not see what it will load, or
// that it would undo.
void require_none_waits(const Resumption* waiting, const std::string& call);

}  // namespace lamina::job_checkpoint
