// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>

#include "lamina/environment/environment.h"

namespace lamina::collective {

// How large the buffers of an all-gather between hosts may be. What would need larger ones goes over the plain backend.
struct GatherLimits {
  std::int64_t scratch_bytes = std::int64_t{16} << 20;  // for what a member gives
  std::int64_t sort_bytes = std::int64_t{128} << 20;    // for an eighth of what all members give

  friend bool operator==(const GatherLimits&, const GatherLimits&) = default;
};

// Reads SMDDP_AG_SCRATCH_BUFFER_SIZE_BYTES and SMDDP_AG_SORT_BUFFER_SIZE_BYTES, multiples of 8192. Throws
// base::UsageError for anything else.
GatherLimits read_gather_limits(const environment::Environment& environment);

// Says why one in which each of `members` gives so many bytes is too large; "" where it is not.
std::string why_too_large(const GatherLimits& limits, int members, std::int64_t bytes);

}  // namespace lamina::collective
