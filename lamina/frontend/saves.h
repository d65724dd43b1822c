// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <utility>

#include "lamina/checkpoint/save.h"
#include "lamina/checkpoint/snapshot.h"
#include "lamina/session/session.h"

namespace lamina::frontend {

// The saves of a job: one at a time.
class Saves {
 public:
  // Collective. With a snapshot training may go on at once.
  std::shared_ptr<checkpoint::Save> begin(session::Session& session, checkpoint::SaveRequest request,
                                          bool with_snapshot);
  // Waits for the one that is under way, and throws what it ended with.
  void end();
  // Throws what it has failed with; see checkpoint::Save.
  void check_before_step();

 private:
  checkpoint::Snapshot snapshot_;
  std::shared_ptr<checkpoint::Save> under_way_;
};

}  // namespace lamina::frontend
