// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "lamina/base/deadline.h"
#include "lamina/session/session.h"

namespace lamina::session {

// How often ranks keep a version of what they have ([Note: kept states] in membership/keepers.h): each so many updates,
// or so seldom that it takes little of their time.
class KeepPace {
 public:
  // std::nullopt: as often as takes kPart of the time, after one that is measured.
  explicit KeepPace(std::optional<std::int64_t> every) : is_measured_(!every), every_(every.value_or(1)) {}
  static constexpr double kPart = 0.02;

  bool is_due(std::int64_t updates) const { return updates - newest_ >= every_; }
  std::int64_t newest() const { return newest_; }  // the updates of the version that was kept last
  std::string text() const;                        // "each 3 updates"; as it was given
  // The version of so many updates is kept, which began then. Where that is measured, it is collective over the world:
  // the first rank's clock counts.
  void note_kept(Session& session, std::int64_t updates, base::Clock::time_point began);
  // All go on from the version of so many updates, maybe in another layout, or with newcomers: it is measured anew.
  void go_on_from(std::int64_t updates);

 private:
  const bool is_measured_;
  std::int64_t every_;
  std::int64_t newest_ = 0;
  std::optional<base::Clock::time_point> kept_at_;  // the newest one
};

// How many updates lie between two versions of which each takes `keeping` seconds, so that these are `part` of the
// time. `updates` took `seconds`, with one version.
std::int64_t updates_between(double keeping, double seconds, std::int64_t updates, double part = KeepPace::kPart);

}  // namespace lamina::session
