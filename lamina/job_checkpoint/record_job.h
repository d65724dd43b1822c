// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "lamina/collective/ranks.h"
#include "lamina/distributed_optimizer/optimizer.h"
#include "lamina/job_checkpoint/job.h"
#include "lamina/verification/run_recorder.h"

// A job in the recording of a run: the same tensors, under the same names, as in its checkpoint.
namespace lamina::job_checkpoint {

// Where the run is recorded in files, has the gradients recorded that the optimizer updates with, from now on. They are
// clipped as the job's are over its shards, also where the layout of this run has none.
void record_updates(distributed_optimizer::Optimizer& optimizer, const collective::Ranks& ranks,
                    std::shared_ptr<verification::RunRecorder> recorder);

// Tells the recorder of a run what its hooks do not see, as a face hears of it. The model, what its optimizers have
// made of it, and the generators of the rank that leads are recorded before the first step, and where the next one
// begins. By then the script has done to them what it does between steps. There the program is to end once all steps
// that are wanted are recorded. Used by the thread that makes the steps; note_cut() by one that runs a body, too.
class JobRecording {
 public:
  explicit JobRecording(std::shared_ptr<verification::RunRecorder> recorder) : recorder_(std::move(recorder)) {}

  // A step function is called; a module is, which counts outside of steps. True: the program is to end.
  [[nodiscard]] bool begin_step(JobAccess& job);
  [[nodiscard]] bool begin_call(JobAccess& job);
  // Its model is cut, has its values, and may be in the middle of its first call.
  void note_cut(JobAccess& job);
  // Takes what the body of a step has returned for each microbatch.
  void see_results(std::span<const std::vector<at::Tensor>> results);
  void end_step();
  // An optimizer that is not the job's is about to update: its gradients are those of the model's parameters.
  void before_update(JobAccess& job);
  // The job ends.
  void end(JobAccess& job);

 private:
  bool record_news(JobAccess& job);
  void record_model(JobAccess& job);
  void record_generators(JobAccess& job);

  const std::shared_ptr<verification::RunRecorder> recorder_;
  bool has_begun_ = false;
  bool has_model_ = false;  // as it was before the first step
};

}  // namespace lamina::job_checkpoint
