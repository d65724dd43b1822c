// SPDX-License-Identifier: Apache-2.0
#include "lamina/job_checkpoint/saves.h"

#include "lamina/base/error.h"

namespace lamina::job_checkpoint {

std::shared_ptr<checkpoint::Save> Saves::begin(checkpoint::Peers peers, checkpoint::SaveRequest request,
                                               bool with_snapshot) {
  under_way_ = std::make_shared<checkpoint::Save>(archive::file_system(), std::move(request), std::move(peers));
  under_way_->start(with_snapshot ? &snapshot_ : nullptr);
  return under_way_;
}

void Saves::end() {
  if (const auto ending = std::exchange(under_way_, nullptr)) ending->end();
}

void Saves::check_before_step() {
  if (under_way_ != nullptr) under_way_->check_before_step();
}

void Saves::drop() {
  if (under_way_ == nullptr) return;
  under_way_->give_up();
  try {
    end();
  } catch (const base::Error&) {  // NOLINT(bugprone-empty-catch): it was given up
  }
}

}  // namespace lamina::job_checkpoint
