// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <map>
#include <optional>

#include "lamina/base/deadline.h"
#include "lamina/launch/ranks/rank_end.h"

namespace lamina::launch {

// Decides when a rank that a signal has ended is started again, while the others go on without it. The pause doubles
// where it has ended soon, and a place whose rank has ended in the same way twice in a row within kQuick of its start
// is given up. A function of what it is told.
class Comebacks {
 public:
  using Time = base::Clock::time_point;
  static constexpr std::chrono::seconds kQuick{10};
  static constexpr std::chrono::milliseconds kFirstPause{500}, kLongestPause{60000};

  // The rank at that place began; also the first time.
  void began(int place, Time now) { places_[place].began = now; }
  // It has ended, and is lost: how long until it is to be started again; none: never.
  std::optional<std::chrono::milliseconds> ended(int place, const RankEnd& end, Time now);
  // A place whose time has come, once.
  std::optional<int> due(Time now);
  std::optional<Time> next() const;  // when there will be one

 private:
  struct Place {
    Time began{};
    std::chrono::milliseconds pause{0};
    std::optional<RankEnd> quick;  // how it ended last, if soon
    std::optional<Time> again;
  };
  std::map<int, Place> places_;
};

}  // namespace lamina::launch
