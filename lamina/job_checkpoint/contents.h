// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "lamina/job_checkpoint/about.h"
#include "lamina/job_checkpoint/job.h"
#include "lamina/job_checkpoint/parts.h"
#include "lamina/job_checkpoint/save_list.h"

namespace lamina::job_checkpoint {

using GroupNames = std::vector<std::vector<std::string>>;  // of parameters, by group

// Everything that a rank has of a job: its parts, and what the first rank tells beside them.
class Contents {
 public:
  enum class Of { kModel, kAll };
  // The job outlives it.
  Contents(JobAccess& job, Of of, SaveList::Has has = SaveList::Has::kWritten);

  // Lists what this rank has.
  void collect();
  // Hands in to the first rank what the others of its pipeline know, which each other one knows alike: collective over
  // a pipeline.
  void hand_in();
  // Tells of the job what is no tensor: on the first rank.
  About describe();
  // The names in the groups of the optimizers, as this rank knows them.
  const std::vector<GroupNames>& names() const { return names_; }

  SaveList& list() { return list_; }

 private:
  void add_model();

  JobAccess& job_;
  const Of of_;
  const Parts parts_;
  SaveList list_;
  std::vector<OptimizerAbout> optimizers_;
  value::Dict extra_, all_extra_;
  std::vector<GroupNames> names_;               // of this rank's optimizers
  std::vector<std::vector<GroupNames>> known_;  // by rank of a copy
};

// Tells of a job what is neither its optimizers' nor the user's.
About about_of(const JobAccess& job);
// The names of the rows of a model, in their order.
std::vector<std::string> rows_of(const model::ParameterTable& table);
// Makes one of what each rank of a copy of the model, whose rows these are, describes without the others.
About about_of_copy(const std::vector<About>& ranks, std::span<const std::string> rows);

}  // namespace lamina::job_checkpoint
