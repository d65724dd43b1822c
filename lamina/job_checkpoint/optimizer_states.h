// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "lamina/job_checkpoint/job.h"
#include "lamina/job_checkpoint/reader.h"
#include "lamina/job_checkpoint/save_list.h"

// The optimizers of a job in its checkpoints. There a state is tensors with names; that of one which is a number, a
// flag or None ends with "#".
namespace lamina::job_checkpoint {

// Calls `found` for each master and state of what stands in this rank's groups, `local`. Throws base::UsageError for a
// state that is neither tensor nor number, or skips it.
void for_each_state(
    int number, OptimizerAccess& optimizer,
    const std::function<void(const StateName&, const at::Tensor& local, const at::Tensor& value)>& found,
    bool skips_others = false);
// Lists masters and states of what stands in this rank's groups. Throws base::UsageError for a state of another kind.
void add_states(int number, OptimizerAccess& optimizer, SaveList& list);
// Class, options and names, as far as this rank knows them.
OptimizerAbout about_of(OptimizerAccess& optimizer);

// Compares the optimizers here with saved ones. Throws base::UsageError where they do not fit; `strict`: in their
// classes and the names of parameters, too.
void check_optimizers(const std::vector<OptimizerAccess*>& here, const std::vector<OptimizerAbout>& saved, bool strict);

// Lists the masters of what stands in this rank's groups.
void want_masters(int number, OptimizerAccess& optimizer, const Parts& parts, Reader& reader);

// The states that an optimizer is to have on this rank, in memory that is filled when the checkpoint is read.
class WantedStates {
 public:
  // Lists them. All outlive it.
  WantedStates(int number, OptimizerAccess& optimizer, const OptimizerAbout& about, const Parts& parts, Reader& reader);

  // Gives them to the optimizer.
  void load();

 private:
  struct Wanted {
    std::string parameter, key;
    at::Tensor value;
  };
  OptimizerAccess* optimizer_;
  const OptimizerAbout* about_;
  std::vector<Wanted> wanted_;
};

}  // namespace lamina::job_checkpoint
