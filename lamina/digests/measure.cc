// SPDX-License-Identifier: Apache-2.0
#include "lamina/digests/measure.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <limits>
#include <string_view>

#include "lamina/base/joined.h"
#include "lamina/base/str.h"

namespace lamina::digests {
namespace {

constexpr double kInfinite = std::numeric_limits<double>::infinity();
constexpr double kSmallest = 1e-9;

// The tolerance of numbers of this type.
double tolerance_of(const Digest& digest) {
  static const std::map<std::string_view, double> of_dtype{
      {"bfloat16", 1e-1}, {"float16", 2e-2}, {"float32", 1e-4}, {"complex64", 1e-4}};
  const auto found = of_dtype.find(digest.dtype);
  return found == of_dtype.end() ? kSmallest : found->second;
}

template <class Numbers>
std::string listed(const Numbers& numbers) {
  return base::str("[", base::joined(numbers), "]");
}

}  // namespace

std::string size_text(double relative) {
  std::array<char, 32> text;
  std::snprintf(text.data(), text.size(), "%.0e", relative);
  return text.data();
}

Measure::Measure(const RecordedParts& first, const RecordedParts& second, const ComparisonOptions& options,
                 double tolerance)
    : terms_(options), tolerance_(tolerance), rounding_(first, second, tolerance) {
  for (const auto& [key, list] : second) {
    const Seen& seen = *list.front().seen;
    double& most = largest_[group(seen)];
    most = std::max(most, seen.digest.norm());
    if (seen.kind != RecordedKind::kInput || seen.digest.elements == 0 ||
        seen.digest.dtype.find("float") == std::string::npos)
      continue;
    double& size = inputs_[seen.name];
    size = std::max(size, seen.digest.norm() / std::sqrt(static_cast<double>(seen.digest.elements)));
  }
}

// A norm below which a tensor is taken to be no more than what rounding left of others of its kind.
double Measure::floor(const Seen& seen) const {
  if (seen.kind == RecordedKind::kParameter) return rounding_.largest_change(seen.step) * 0.1;
  if (seen.kind == RecordedKind::kResult) return 0;
  if (seen.kind == RecordedKind::kBuffer) {  // of inputs that are all alike a variance is what rounding left of them
    const auto found = inputs_.find(outer(seen.name));
    const double elements = static_cast<double>(seen.digest.whole());
    return found == inputs_.end() ? 0 : tolerance_ * found->second * std::sqrt(elements);
  }
  const auto found = largest_.find(group(seen));
  const bool is_gradient = seen.kind != RecordedKind::kInput && seen.kind != RecordedKind::kOutput;
  return found == largest_.end() ? 0 : found->second * (is_gradient ? 0.1 : 1e-3);
}

// The norm of a difference that is none in a tensor of this size, but for what an update makes of rounding in it.
double Measure::tolerated(const Digest& digest, const Seen& seen, double scale) const {
  const double own = terms_.tolerance ? 0 : tolerance_of(digest);
  const double rounding = std::max(tolerance_, own) * static_cast<double>(std::max<std::int64_t>(seen.step, 0) + 1);
  const auto parted = rounding_.parted(seen.step);
  const double of_gradients = (rounding + 2 * std::sqrt(parted.relative)) * scale;
  switch (seen.kind) {
    case RecordedKind::kParameter:
      return rounding * scale;
    case RecordedKind::kOutputGradient:
    case RecordedKind::kGradient:
      return of_gradients;
    case RecordedKind::kState:
      return 2 * of_gradients;  // as the mean of squares, which differs twice as much
    default:
      return (rounding + 4 * parted.relative) * scale + 2 * parted.norm + rounding_.drifted(seen, digest);
  }
}

Measure::Group Measure::group(const Seen& seen) {
  const RecordedKind kind = seen.kind == RecordedKind::kInput ? RecordedKind::kOutput : seen.kind;
  const auto space = seen.name.rfind(' ');
  return {seen.step, seen.microbatch, kind, seen.kind == RecordedKind::kState ? seen.name.substr(space + 1) : ""};
}

Compared Measure::compare(const Digest& first, const Digest& second, const Seen& seen) const {
  // An optimizer may take gradients as they come, or as it wants them.
  if (first.dtype != second.dtype && seen.kind != RecordedKind::kGradient)
    return {kInfinite, base::str("is ", first.dtype, " instead of ", second.dtype)};
  if (first.shape != second.shape) {
    return {kInfinite, base::str("has shape ", listed(first.shape), " instead of ", listed(second.shape))};
  }
  if (first.not_finite != second.not_finite) {
    return {kInfinite,
            base::str("has ", first.not_finite, " elements that are not finite instead of ", second.not_finite)};
  }
  const double apart = distance(first, second);
  if (seen.kind == RecordedKind::kGenerator) return {0, apart == 0 ? "" : "is another one"};
  const double scale = std::max({first.norm(), second.norm(), floor(seen)});
  const double relative = apart == 0 || scale == 0 ? 0 : apart / scale;
  if (terms_.bits) return {relative, first.bits == second.bits ? "" : "has other bits, by " + size_text(relative)};
  if (seen.kind == RecordedKind::kState && rounding_.is_noise(seen)) return {};
  const double excess = std::max(apart - rounding_.amplified(seen, second), 0.0);
  if (excess > tolerated(second, seen, scale)) return {relative, "differs by " + size_text(relative)};
  return {scale == 0 ? 0 : excess / scale, ""};
}

double tolerance_of(const RankRecordings& run) {
  double most = kSmallest;
  for (const auto& rank : run) {
    for (const auto& seen : rank.seen) {
      if (seen.kind != RecordedKind::kState) most = std::max(most, tolerance_of(seen.digest));
    }
  }
  return most;
}

}  // namespace lamina::digests
