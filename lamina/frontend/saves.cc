// SPDX-License-Identifier: Apache-2.0
#include "lamina/frontend/saves.h"

#include "lamina/session/checkpoint_parts.h"

namespace lamina::frontend {

void SaveUnderWay::wait() {
  try {
    save_->wait();
  } catch (...) {
    told_ = save_->is_over();
    throw;
  }
}

std::shared_ptr<SaveUnderWay> Saves::begin(session::Session& session, checkpoint::SaveRequest request,
                                           bool with_snapshot) {
  auto save =
      std::make_unique<checkpoint::Save>(archive::file_system(), std::move(request), session::peers_of(session));
  save->start(with_snapshot ? &snapshot_ : nullptr);
  under_way_ = std::make_shared<SaveUnderWay>(std::move(save));
  return under_way_;
}

void Saves::end() {
  if (const auto ending = std::exchange(under_way_, nullptr)) ending->end();
}

void Saves::check() {
  if (under_way_ != nullptr && under_way_->is_over()) end();
}

}  // namespace lamina::frontend
