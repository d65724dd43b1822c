// SPDX-License-Identifier: Apache-2.0
#include "lamina/session/admission.h"

#include <algorithm>

namespace lamina::session {
namespace {

bool comes_back(const Entrant& one) { return one.together == 0; }

}  // namespace

bool Admission::may_enter(const std::vector<Entrant>& waiting, Time now) const {
  if (std::ranges::any_of(waiting, comes_back)) return true;
  if (waiting.empty() || (last_ && now < *last_ + every_)) return false;
  const auto is_complete = [&](const Entrant& one) {
    return std::ranges::count(waiting, one.node, &Entrant::node) >= one.together;
  };
  const auto first = std::ranges::min(waiting, {}, &Entrant::came).came;
  return now >= first + kGathers || std::ranges::all_of(waiting, is_complete);
}

void Admission::entered(const std::vector<Entrant>& these, Time now) {
  if (!std::ranges::all_of(these, comes_back)) last_ = now;
}

}  // namespace lamina::session
