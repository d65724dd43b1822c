// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace lamina::value {

// The dimension in which a guarded slice is cut, and how many places that has in the whole.
struct WhereCut {
  int dim = 0;  // or one of the following
  std::int64_t extent = 0;
  static constexpr int kTorn = -1;    // its dimensions are others than those of the whole, whose elements count
  static constexpr int kJoined = -2;  // it was joined of others, of which some are slices
};

}  // namespace lamina::value
