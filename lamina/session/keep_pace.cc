// SPDX-License-Identifier: Apache-2.0
#include "lamina/session/keep_pace.h"

#include <algorithm>
#include <chrono>
#include <cmath>

#include "lamina/base/str.h"
#include "lamina/messaging/agreement.h"

namespace lamina::session {

void KeepPace::note_kept(Session& session, std::int64_t updates, base::Clock::time_point began) {
  const auto seconds = [](auto time) { return std::chrono::duration<double>(time).count(); };
  const auto now = base::Clock::now();
  if (is_measured_ && kept_at_ && updates > newest_) {
    std::optional<value::Value> own;
    if (session.world().rank.value == 0) {
      own = updates_between(seconds(now - began), seconds(began - *kept_at_), updates - newest_);
    }
    const auto members = session.members(topology::Group::kWorld);
    every_ = messaging::first_given(session.mailbox(), members, std::move(own), session.patience())
                 ->value.as<std::int64_t>();
  }
  newest_ = updates;
  kept_at_ = now;
}

void KeepPace::go_on_from(std::int64_t updates) {
  if (is_measured_) every_ = 1;
  newest_ = updates;
  kept_at_ = base::Clock::now();
}

std::string KeepPace::text() const {
  return is_measured_ ? "as often as its time allows" : base::str("each ", every_, every_ > 1 ? " updates" : " update");
}

std::int64_t updates_between(double keeping, double seconds, std::int64_t updates, double part) {
  const double each = std::max(seconds / static_cast<double>(updates), 1e-9);
  return std::max<std::int64_t>(1, std::llround(std::min(std::ceil(keeping / (part * each)), 1e6)));
}

}  // namespace lamina::session
