// SPDX-License-Identifier: Apache-2.0
#include "lamina/digests/causes.h"

#include <algorithm>
#include <set>

#include "lamina/base/str.h"

namespace lamina::digests {
namespace {

constexpr std::size_t kNamed = 5;

// Finds what the call has read on that rank, or else on the first of the copy that made it.
const Reads* reads_of(const std::vector<RankRecording>& run, const CallName& call, std::int64_t copy,
                      std::int64_t rank) {
  const Reads* found = nullptr;
  for (const auto& each : run) {
    const auto reads = each.reads.find(call);
    if (each.copy != copy || reads == each.reads.end()) continue;
    if (each.rank == rank) return &reads->second;
    if (found == nullptr) found = &reads->second;
  }
  return found;
}

bool agree(const std::vector<Digest>& first, const std::vector<Digest>& second, double tolerance) {
  return std::ranges::equal(first, second, [&](const Digest& one, const Digest& other) {
    return one.dtype == other.dtype && one.shape == other.shape && one.not_finite == other.not_finite &&
           distance(one, other) <= tolerance * std::max(one.norm(), other.norm());
  });
}

bool is_hash(const std::string& value) { return value.starts_with('#'); }

// The number that these are the digest of, in words; empty where they are of more.
std::string number_of(const std::vector<Digest>& digests) {
  if (digests.size() != 1 || digests.front().elements != 1 || digests.front().not_finite > 0) return {};
  return base::str(digests.front().projections[0] * sign_of(0, 0));
}

// Says how a variable differs: "which is 3 instead of 2"; empty where it does not.
std::string apart(const Reads& first, const Reads& second, const std::string& name, double tolerance) {
  const auto one = first.values.find(name), other = second.values.find(name);
  if (one == first.values.end()) return "which only the second run has";
  if (other == second.values.end()) return "which only the first run has";
  if (one->second != other->second) {
    const bool hashed = is_hash(one->second) || is_hash(other->second);
    return hashed ? "which has other contents" : base::str("which is ", one->second, " instead of ", other->second);
  }
  const auto numbers = first.tensors.find(name), others = second.tensors.find(name);
  const std::vector<Digest> none;
  const auto& mine = numbers == first.tensors.end() ? none : numbers->second;
  const auto& theirs = others == second.tensors.end() ? none : others->second;
  if (agree(mine, theirs, tolerance)) return {};
  const std::string number = number_of(mine), instead = number_of(theirs);
  const bool is_said = !number.empty() && !instead.empty();
  return is_said ? base::str("which is ", number, " instead of ", instead) : "which has other contents";
}

std::string joined(const std::vector<std::string>& parts) {
  std::string text;
  const std::size_t count = std::min(parts.size(), kNamed);
  for (std::size_t i = 0; i < count; ++i) {
    const bool is_last = i + 1 == count && parts.size() <= kNamed;
    text += base::str(i == 0 ? "" : (is_last ? ", and " : ", "), parts[i]);
  }
  if (parts.size() > kNamed) text += base::str(", and ", parts.size() - kNamed, " more");
  return text;
}

}  // namespace

std::string cause_of(const Difference& difference) {
  if (!difference.reads.empty()) return difference.reads;
  if (!difference.inputs_agree || !difference.first || !difference.second) return {};
  const auto& [modes, generator, drew] = *difference.first;
  const auto& [other_modes, other_generator, other_drew] = *difference.second;
  if (modes != other_modes) return base::str(": it ran with ", modes, " instead of ", other_modes);
  if (drew && !other_drew) return ": it draws random numbers, which it does not in the second run";
  if (other_drew && !drew) return ": it draws no random numbers, as it does in the second run";
  if (drew && generator != other_generator) return ": it draws random numbers, and they began at another place";
  return {};
}

std::optional<CallName> call_to_look_at(const Difference& difference, const std::vector<RankRecording>& run) {
  const Seen& seen = difference.seen;
  if (seen.kind == Kind::kOutput && difference.inputs_agree) return call_of(seen);
  if (seen.kind != Kind::kInput) return {};
  for (std::string name = seen.name; !name.empty();) {
    const auto point = name.rfind('.');
    name.resize(point == std::string::npos ? 0 : point);
    CallName around{seen.step, seen.microbatch, name, 0};
    if (std::ranges::any_of(run, [&](const auto& rank) { return rank.calls.contains(around); })) return around;
  }
  return {};
}

std::string reads_apart(const std::vector<RankRecording>& first, const std::vector<RankRecording>& second,
                        const Difference& difference, const CallName& call, double tolerance) {
  const Reads* one = reads_of(first, call, difference.copy, difference.rank);
  const Reads* other = reads_of(second, call, difference.copy, -1);
  if (one == nullptr || other == nullptr) return {};
  std::set<std::string> names;
  for (const Reads* reads : {one, other}) {
    for (const auto& [name, value] : reads->values) names.insert(name);
  }
  std::vector<std::string> found;
  for (const auto& name : names) {
    std::string how = apart(*one, *other, name, tolerance);
    if (how.empty()) continue;
    const auto also = one->users.find(name);
    if (also != one->users.end()) how += base::str(" (", also->second, ")");
    found.push_back(base::str(name, ", ", how));
  }
  std::string where;
  if (difference.seen.kind == Kind::kInput) {
    const auto& name = std::get<std::string>(call);
    where = base::str(", in the code of ", name.empty() ? "the model" : name);
  }
  return where + (found.empty() ? "; what it was seen to read agrees" : ": it reads " + joined(found));
}

std::vector<std::string> gaps(const std::vector<RankRecording>& run, const std::string& name) {
  std::vector<std::string> found;
  std::set<std::int64_t> here;
  for (const auto& rank : run) {
    here.insert(rank.rank);
    if (rank.ended) continue;
    found.push_back(base::str(name, ": the recording of rank ", rank.rank, " breaks off after ", rank.steps,
                              rank.steps == 1 ? " step" : " steps"));
  }
  for (std::int64_t rank = 0; rank < run.front().world; ++rank) {
    if (!here.contains(rank)) found.push_back(base::str(name, ": there is no recording of rank ", rank));
  }
  return found;
}

}  // namespace lamina::digests
