// SPDX-License-Identifier: Apache-2.0
#include "lamina/frontend/saves.h"

#include "lamina/session/checkpoint_parts.h"

namespace lamina::frontend {

std::shared_ptr<checkpoint::Save> Saves::begin(session::Session& session, checkpoint::SaveRequest request,
                                               bool with_snapshot) {
  under_way_ =
      std::make_shared<checkpoint::Save>(archive::file_system(), std::move(request), session::peers_of(session));
  under_way_->start(with_snapshot ? &snapshot_ : nullptr);
  return under_way_;
}

void Saves::end() {
  if (const auto ending = std::exchange(under_way_, nullptr)) ending->end();
}

void Saves::check_before_step() {
  if (under_way_ != nullptr) under_way_->check_before_step();
}

}  // namespace lamina::frontend
