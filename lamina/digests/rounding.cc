// SPDX-License-Identifier: Apache-2.0
#include "lamina/digests/rounding.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace lamina::digests {
namespace {

constexpr double kMoreAlike = 1.5;
// Beyond this tolerance elements that are rounding may be larger than those that digests count as small.
constexpr double kCoarse = 1e-4;

std::string_view updated_by(const Seen& seen) {
  return seen.kind == RecordedKind::kState ? parameter_of(seen.name) : std::string_view(seen.name);
}

// The root of the mean square of the elements in their largest one: 1 where all are of one size.
double alikeness(const Digest& digest) {
  if (digest.largest == 0 || digest.elements == 0) return 0;
  return std::sqrt(digest.squares / static_cast<double>(digest.elements)) / digest.largest;
}

template <class Map, class Name>
auto value_at(const Map& map, const Name& name) {
  const auto found = map.find(name);
  return found == map.end() ? typename Map::mapped_type{} : found->second;
}

}  // namespace

Rounding::Rounding(const RecordedParts& first, const RecordedParts& second, double tolerance) : tolerance_(tolerance) {
  note_gradients(second);
  for (const auto& [key, list] : second) {
    if (key.kind != RecordedKind::kParameter) continue;
    const auto wholes = wholes_of(list);
    if (wholes.empty()) continue;
    if (key.step < 0) initial_.emplace(key.name, wholes.front().digest);
    double& change = largest_change_[key.step];
    const double own = change_of(key.name, wholes.front().digest);
    change = std::max(change, own);
    if (key.step < 0 || !is_noise(*list.front().seen)) continue;
    double& drift = drifts_[std::string(outer(key.name))][key.step];
    drift = std::max(drift, own / std::sqrt(static_cast<double>(wholes.front().digest.elements)));
  }
  note_states(second);
  note_parted(first, second);
}

void Rounding::note_gradients(const RecordedParts& second) {
  std::map<std::int64_t, double> largest;
  std::map<std::pair<std::int64_t, std::string_view>, double> norms;
  for (const auto& [key, list] : second) {
    if (key.kind != RecordedKind::kGradient) continue;
    for (const auto& [digest, of, is_part] : wholes_of(list)) {
      if (digest.elements == 0) continue;
      const double small = static_cast<double>(digest.small) / static_cast<double>(digest.elements);
      const auto [known, is_new] = gradients_.try_emplace(std::string(key.name));
      if (is_new) known->second.alike = alikeness(digest), known->second.elements = digest.elements;
      known->second.small = std::max(known->second.small, small);
      largest[key.step] = std::max(largest[key.step], digest.norm());
      const auto [norm, is_first] = norms.try_emplace({key.step, key.name}, digest.norm());
      norm->second = std::min(norm->second, digest.norm());
    }
  }
  for (const auto& [name, norm] : norms) {
    double& share = gradients_.find(name.second)->second.share_of_norms;
    if (largest.at(name.first) > 0) share = std::min(share, norm / largest.at(name.first));
  }
}

// A state is looked at where it is first seen: later ones are made of several gradients.
void Rounding::note_states(const RecordedParts& second) {
  std::set<std::string_view> known;
  for (const auto& [key, list] : second) {
    if (key.kind != RecordedKind::kState || !known.insert(key.name).second) continue;
    const auto wholes = wholes_of(list);
    const auto* gradient = gradient_of(updated_by(*list.front().seen));
    if (gradient == nullptr || wholes.empty() || wholes.front().digest.elements != gradient->elements) continue;
    if (alikeness(wholes.front().digest) > kMoreAlike * gradient->alike) made_of_updates_.emplace(key.name);
  }
}

// The size of a module's largest parameter counts: a bias that begins with zero is nothing beside its weight.
void Rounding::note_parted(const RecordedParts& first, const RecordedParts& second) {
  std::map<std::string_view, double> sizes;
  for (const auto& [name, digest] : initial_) {
    double& size = sizes[outer(name)];
    size = std::max(size, digest.norm());
  }
  for (const auto& [key, list] : second) {
    const auto other = first.find(key);
    if (key.kind != RecordedKind::kParameter || key.step < 0 || other == first.end()) continue;
    const auto wholes = wholes_of(list), others = wholes_of(other->second);
    const Seen& seen = *list.front().seen;
    const auto* gradient = gradient_of(key.name);
    const bool has_small = gradient != nullptr && (gradient->small > 0 || tolerance_ > kCoarse);
    const bool may_part = (has_small && !is_noise(seen)) || parted(key.step).norm > 0;
    if (!may_part || wholes.empty() || others.empty()) continue;
    const Digest &one = others.front().digest, &now = wholes.front().digest;
    const double size = std::max(value_at(sizes, outer(key.name)), now.norm()), apart = distance(one, now);
    if (apart <= 0.1 * tolerance_ * size || apart > amplified(seen, now)) continue;
    Parted& most = parted_[key.step];
    most = {std::max(most.relative, apart / size), std::max(most.norm, apart)};
  }
}

bool Rounding::is_noise(const Seen& seen) const {
  if (seen.kind != RecordedKind::kState && seen.kind != RecordedKind::kParameter) return false;
  const auto* gradient = gradient_of(updated_by(seen));
  return gradient != nullptr && gradient->share_of_norms > 0 && gradient->share_of_norms < 0.1 * tolerance_;
}

double Rounding::amplified(const Seen& seen, const Digest& now) const {
  if (seen.step < 0 || (seen.kind != RecordedKind::kParameter && !made_of_updates_.contains(seen.name))) return 0;
  const auto* gradient = gradient_of(updated_by(seen));
  double change = change_of(updated_by(seen), now);
  // A state begins with zero or, as an average of parameters, with the parameter.
  if (seen.kind == RecordedKind::kState) change = change == 0 ? now.norm() : std::min(change, now.norm());
  const double share = is_noise(seen) ? 1 : gradient == nullptr ? 0 : std::sqrt(gradient->small);
  return change * (std::min(0.5, 100 * tolerance_) + 4 * share + 4 * std::sqrt(parted(seen.step).relative));
}

Rounding::Parted Rounding::parted(std::int64_t step) const {
  Parted most;
  for (const auto& [after, apart] : parted_) {
    if (after < step) most = {std::max(most.relative, apart.relative), std::max(most.norm, apart.norm)};
  }
  return most;
}

double Rounding::drifted(const Seen& output, const Digest& now) const {
  const auto found = drifts_.find(output.name);
  if (output.kind != RecordedKind::kOutput || found == drifts_.end()) return 0;
  double most = 0;
  for (const auto& [after, drift] : found->second) {
    if (after < output.step) most = std::max(most, drift);
  }
  return 2 * most * std::sqrt(static_cast<double>(now.whole()));  // each run has its own
}

double Rounding::largest_change(std::int64_t step) const { return value_at(largest_change_, step); }

double Rounding::change_of(std::string_view parameter, const Digest& now) const {
  const auto before = initial_.find(parameter);
  return before == initial_.end() ? 0 : distance(now, before->second);
}

const Rounding::Gradient* Rounding::gradient_of(std::string_view parameter) const {
  const auto found = gradients_.find(parameter);
  return found == gradients_.end() ? nullptr : &found->second;
}

}  // namespace lamina::digests
