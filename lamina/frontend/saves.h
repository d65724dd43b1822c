// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <utility>

#include "lamina/checkpoint/save.h"
#include "lamina/checkpoint/snapshot.h"
#include "lamina/session/session.h"

namespace lamina::frontend {

// A checkpoint that is being saved. Its error is thrown once: by whoever waits for it first.
class SaveUnderWay {
 public:
  explicit SaveUnderWay(std::unique_ptr<checkpoint::Save> save) : save_(std::move(save)) {}

  bool is_over() const { return save_->is_over(); }
  void wait();
  // As wait(), without an error that was thrown already.
  void end() {
    if (!told_) wait();
  }

 private:
  std::unique_ptr<checkpoint::Save> save_;
  bool told_ = false;
};

// The saves of a job: one at a time.
class Saves {
 public:
  // Collective. With a snapshot training may go on at once.
  std::shared_ptr<SaveUnderWay> begin(session::Session& session, checkpoint::SaveRequest request, bool with_snapshot);
  // Waits for the one that is under way, and throws what it ended with.
  void end();
  // Throws what a save has failed with that has ended since.
  void check();

 private:
  checkpoint::Snapshot snapshot_;
  std::shared_ptr<SaveUnderWay> under_way_;
};

}  // namespace lamina::frontend
