// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <utility>

#include "lamina/checkpoint/save.h"
#include "lamina/checkpoint/snapshot.h"

namespace lamina::job_checkpoint {

// The saves of a job: one at a time.
class Saves {
 public:
  // Collective. With a snapshot training may go on at once.
  std::shared_ptr<checkpoint::Save> begin(checkpoint::Peers peers, checkpoint::SaveRequest request, bool with_snapshot);
  bool are_under_way() const { return under_way_ != nullptr && !under_way_->is_over(); }
  // Waits for the one that is under way, and throws what it ended with.
  void end();
  // Throws what it has failed with, on every rank before the same step; see checkpoint::Save.
  void check_before_step();
  // Gives up the one that is under way, and its error.
  void drop();

 private:
  checkpoint::Snapshot snapshot_;
  std::shared_ptr<checkpoint::Save> under_way_;
};

}  // namespace lamina::job_checkpoint
