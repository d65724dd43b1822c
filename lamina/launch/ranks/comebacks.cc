// SPDX-License-Identifier: Apache-2.0
#include "lamina/launch/ranks/comebacks.h"

#include <algorithm>
#include <utility>

namespace lamina::launch {

std::optional<std::chrono::milliseconds> Comebacks::ended(int place, const RankEnd& end, Time now) {
  Place& at = places_[place];
  const bool quick = now - at.began < kQuick;
  const auto before = std::exchange(at.quick, quick ? std::optional(end) : std::nullopt);
  if (quick && before && before->signal == end.signal) return std::nullopt;
  at.pause = before ? std::min(2 * at.pause, kLongestPause) : kFirstPause;
  at.again = now + at.pause;
  return at.pause;
}

std::optional<int> Comebacks::due(Time now) {
  for (auto& [place, at] : places_) {
    if (!at.again || now < *at.again) continue;
    at.again.reset();
    return place;
  }
  return std::nullopt;
}

std::optional<Comebacks::Time> Comebacks::next() const {
  std::optional<Time> soonest;
  for (const auto& [place, at] : places_) {
    if (at.again) soonest = std::min(soonest.value_or(*at.again), *at.again);
  }
  return soonest;
}

}  // namespace lamina::launch
