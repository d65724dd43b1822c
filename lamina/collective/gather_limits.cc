// SPDX-License-Identifier: Apache-2.0
#include "lamina/collective/gather_limits.h"

#include <charconv>

#include "lamina/base/error.h"
#include "lamina/base/str.h"

namespace lamina::collective {
namespace {

constexpr auto kScratch = "SMDDP_AG_SCRATCH_BUFFER_SIZE_BYTES";
constexpr auto kSort = "SMDDP_AG_SORT_BUFFER_SIZE_BYTES";
constexpr std::int64_t kGranule = 8192;

void read(const environment::Environment& environment, const char* name, std::int64_t& bytes) {
  const auto text = environment(name);
  if (!text) return;
  const char* end = text->data() + text->size();
  const auto [last, error] = std::from_chars(text->data(), end, bytes);
  if (error == std::errc() && last == end && bytes > 0 && bytes % kGranule == 0) return;
  throw base::UsageError(base::str(name, ": '", *text, "' is not allowed; expected a multiple of ", kGranule));
}

}  // namespace

GatherLimits read_gather_limits(const environment::Environment& environment) {
  GatherLimits limits;
  read(environment, kScratch, limits.scratch_bytes);
  read(environment, kSort, limits.sort_bytes);
  return limits;
}

std::string why_too_large(const GatherLimits& limits, int members, std::int64_t bytes) {
  if (bytes > limits.scratch_bytes) {
    return base::str(bytes, " bytes of each rank are more than ", kScratch, " (", limits.scratch_bytes, ")");
  }
  const auto needed = (members * bytes + 7) / 8;
  if (needed > limits.sort_bytes) {
    return base::str("an eighth of ", members, " times ", bytes, " bytes is more than ", kSort, " (", limits.sort_bytes,
                     ")");
  }
  return "";
}

}  // namespace lamina::collective
