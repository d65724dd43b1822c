// SPDX-License-Identifier: Apache-2.0
#include "lamina/digests/measure.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <limits>
#include <string_view>

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

// The norm of the difference, as far as projections tell.
double projected_distance(const Digest& first, const Digest& second) {
  double squares = 0;
  for (int i = 0; i < kProjections; ++i) squares += std::pow(first.projections[i] - second.projections[i], 2);
  return std::sqrt(squares / kProjections);
}

template <class Numbers>
std::string listed(const Numbers& numbers) {
  std::string text;
  for (const auto each : numbers) text += base::str(text.empty() ? "" : ", ", each);
  return base::str("[", text, "]");
}

}  // namespace

std::string size_text(double relative) {
  std::array<char, 32> text;
  std::snprintf(text.data(), text.size(), "%.0e", relative);
  return text.data();
}

double distance(const Digest& first, const Digest& second) {
  return std::max(std::abs(first.norm() - second.norm()), projected_distance(first, second));
}

Measure::Measure(const Parts& second, const Terms& terms, double tolerance) : terms_(terms), tolerance_(tolerance) {
  for (const auto& [key, list] : second) {
    const Seen& seen = *list.front().seen;
    double& most = largest_[group(seen)];
    most = std::max(most, seen.digest.norm());
    if (seen.kind == Kind::kGradient) note_small(seen, list);
    if (seen.kind != Kind::kParameter) continue;
    if (seen.step < 0) initial_.emplace(seen.name, list);
    double& change = largest_change_[seen.step];
    change = std::max(change, change_of(seen.name, wholes_of(list)));
  }
  for (const auto& [key, list] : second) {
    const Seen& seen = *list.front().seen;
    const double most = seen.kind == Kind::kGradient ? largest_.at(group(seen)) : 0;
    if (most == 0) continue;
    double& share = smallest_share_.try_emplace(seen.name, 1).first->second;
    for (const auto& whole : wholes_of(list)) share = std::min(share, whole.digest.norm() / most);
  }
}

// True of a parameter, or an optimizer's state of one, of which a gradient was no more than rounding, as that of a bias
// before a softmax is. An optimizer may make anything of it.
bool Measure::is_noise(const Seen& seen) const {
  const bool is_state = seen.kind == Kind::kState;
  if (!is_state && seen.kind != Kind::kParameter) return false;
  const auto share = smallest_share_.find(is_state ? seen.name.substr(0, seen.name.rfind(' ')) : seen.name);
  return share != smallest_share_.end() && share->second > 0 && share->second < 0.1 * tolerance_;
}

// A norm below which a tensor is taken to be no more than what rounding left of others of its kind.
double Measure::floor(const Seen& seen) const {
  if (seen.kind == Kind::kParameter) {
    const auto found = largest_change_.find(seen.step);
    return found == largest_change_.end() ? 0 : found->second * 0.1;
  }
  if (seen.kind == Kind::kBuffer || seen.kind == Kind::kResult) return 0;
  const auto found = largest_.find(group(seen));
  const bool is_gradient = seen.kind != Kind::kInput && seen.kind != Kind::kOutput;
  return found == largest_.end() ? 0 : found->second * (is_gradient ? 0.1 : 1e-3);
}

// Estimates what an update makes of rounding: an optimizer that divides gradients by their size gives a small one as
// much weight as any other.
double Measure::amplified(const Seen& seen, const Digest& now) const {
  if (seen.kind != Kind::kParameter || seen.step < 0) return 0;
  const double change = change_of(seen.name, {{now, {}}});
  const auto small = small_.find(seen.name);
  const double share = is_noise(seen) ? 1 : small == small_.end() ? 0 : std::sqrt(small->second);
  return change * (std::min(0.5, 100 * tolerance_) + 4 * share);
}

Measure::Group Measure::group(const Seen& seen) {
  const Kind kind = seen.kind == Kind::kInput ? Kind::kOutput : seen.kind;
  const auto space = seen.name.rfind(' ');
  return {seen.step, seen.microbatch, kind, seen.kind == Kind::kState ? seen.name.substr(space + 1) : ""};
}

// Returns the norm of what has become of a parameter since the beginning.
double Measure::change_of(const std::string& name, const std::vector<Whole>& now) const {
  const auto before = initial_.find(name);
  if (before == initial_.end() || now.empty()) return 0;
  const auto wholes = wholes_of(before->second);
  return wholes.empty() ? 0 : projected_distance(now.front().digest, wholes.front().digest);
}

void Measure::note_small(const Seen& seen, const std::vector<Part>& list) {
  for (const auto& whole : wholes_of(list)) {
    if (whole.digest.elements == 0) continue;
    const double share = static_cast<double>(whole.digest.small) / static_cast<double>(whole.digest.elements);
    double& most = small_[seen.name];
    most = std::max(most, share);
  }
}

Compared Measure::compare(const Digest& first, const Digest& second, const Seen& seen) const {
  // An optimizer may take gradients as they come, or as it wants them.
  if (first.dtype != second.dtype && seen.kind != Kind::kGradient)
    return {kInfinite, base::str("is ", first.dtype, " instead of ", second.dtype)};
  if (first.shape != second.shape) {
    return {kInfinite, base::str("has shape ", listed(first.shape), " instead of ", listed(second.shape))};
  }
  if (first.not_finite != second.not_finite) {
    return {kInfinite,
            base::str("has ", first.not_finite, " elements that are not finite instead of ", second.not_finite)};
  }
  const double apart = distance(first, second);
  if (seen.kind == Kind::kGenerator) return {0, apart == 0 ? "" : "is another one"};
  const double scale = std::max({first.norm(), second.norm(), floor(seen)});
  const double relative = apart == 0 || scale == 0 ? 0 : apart / scale;
  if (terms_.bits) return {relative, first.bits == second.bits ? "" : "has other bits, by " + size_text(relative)};
  if (seen.kind == Kind::kState && is_noise(seen)) return {};
  const double own = terms_.tolerance ? 0 : tolerance_of(second);
  const double squared = seen.kind == Kind::kState ? 2 : 1;  // as the mean of squares, which differs twice as much
  const double tolerated =
      squared * std::max(tolerance_, own) * static_cast<double>(std::max<std::int64_t>(seen.step, 0) + 1);
  const double excess = std::max(apart - amplified(seen, second), 0.0);
  if (excess > tolerated * scale) return {relative, "differs by " + size_text(relative)};
  return {scale == 0 ? 0 : excess / scale, ""};
}

double tolerance_of(const Run& run) {
  double most = kSmallest;
  for (const auto& rank : run) {
    for (const auto& seen : rank.seen) {
      if (seen.kind != Kind::kState) most = std::max(most, tolerance_of(seen.digest));
    }
  }
  return most;
}

}  // namespace lamina::digests
