// SPDX-License-Identifier: Apache-2.0
#include "lamina/digests/causes.h"

#include <algorithm>
#include <functional>
#include <set>
#include <utility>

#include "lamina/base/module_names.h"
#include "lamina/base/rank_list.h"
#include "lamina/base/str.h"
#include "lamina/digests/wholes.h"

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

// Says of each variable that differs between what two calls read how it does.
std::vector<std::string> all_apart(const Reads& first, const Reads& second, double tolerance) {
  std::set<std::string> names;
  for (const Reads* reads : {&first, &second}) {
    for (const auto& [name, value] : reads->values) names.insert(name);
  }
  std::vector<std::string> found;
  for (const auto& name : names) {
    std::string how = apart(first, second, name, tolerance);
    if (how.empty()) continue;
    const auto also = first.users.find(name);
    if (also != first.users.end()) how += base::str(" (", also->second, ")");
    found.push_back(base::str(name, ", ", how));
  }
  return found;
}

// The module that a tensor is of.
std::string_view module_of(const Seen& seen) {
  return is_of_call(seen.kind) ? std::string_view(seen.name) : outer(seen.name);
}

bool is_around(const std::string& module, const std::string& name) {
  return module.empty() || base::is_in_module(name, module);
}

// The first call of the innermost module around this one that is called in its microbatch.
std::vector<CallName> around(const Seen& seen, const std::vector<RankRecording>& run) {
  for (std::string name = seen.name; !name.empty();) {
    name.resize(outer(name).size());
    CallName call{seen.step, seen.microbatch, name, 0};
    if (std::ranges::any_of(run, [&](const auto& rank) { return rank.calls.contains(call); })) return {call};
  }
  return {};
}

// Calls of modules that took this output, the innermost ones first.
std::vector<CallName> takers_of(const Seen& gradient, std::int64_t copy, const std::vector<RankRecording>& run) {
  const Digest* output = nullptr;
  for (const auto& rank : run) {
    for (const auto& seen : rank.seen) {
      const bool is_it = seen.kind == RecordedKind::kOutput && rank.copy == copy && call_of(seen) == call_of(gradient);
      if (is_it && seen.index == gradient.index) output = &seen.digest;
    }
  }
  std::set<CallName> found;
  for (const auto& rank : run) {
    for (const auto& seen : rank.seen) {
      const bool is_near = seen.kind == RecordedKind::kInput && rank.copy == copy && seen.step == gradient.step &&
                           seen.microbatch == gradient.microbatch && !is_around(seen.name, gradient.name);
      if (is_near && output != nullptr && seen.digest == *output) found.insert(call_of(seen));
    }
  }
  std::vector<CallName> calls(found.begin(), found.end());
  std::ranges::stable_sort(calls, std::ranges::greater(),
                           [](const CallName& call) { return std::ranges::count(std::get<std::string>(call), '.'); });
  calls.resize(std::min(calls.size(), kNamed));
  return calls;
}

// The first call in that step of the innermost module that has this parameter.
std::vector<CallName> owner_of(const Seen& parameter, const std::vector<RankRecording>& run) {
  std::string name = parameter.name;
  do {
    name.resize(outer(name).size());
    for (const auto& rank : run) {
      for (const auto& [call, surroundings] : rank.calls) {
        if (std::get<0>(call) == parameter.step && std::get<std::string>(call) == name) return {call};
      }
    }
  } while (!name.empty());
  return {};
}

}  // namespace

std::string cause_of(const Difference& difference) {
  if (!difference.reads.empty()) return difference.reads;
  const bool is_gradient = difference.seen.kind == RecordedKind::kOutputGradient;
  if ((!difference.inputs_agree && !is_gradient) || !difference.first || !difference.second) return {};
  const auto& [modes, generator, drew] = *difference.first;
  const auto& [other_modes, other_generator, other_drew] = *difference.second;
  if (modes != other_modes) return base::str(": it ran with ", modes, " instead of ", other_modes);
  if (is_gradient) return {};
  if (drew && !other_drew) return ": it draws random numbers, which it does not in the second run";
  if (other_drew && !drew) return ": it draws no random numbers, as it does in the second run";
  if (drew && generator != other_generator) return ": it draws random numbers, and they began at another place";
  return {};
}

std::vector<CallName> calls_to_look_at(const Difference& difference, const std::vector<RankRecording>& run) {
  const Seen& seen = difference.seen;
  switch (seen.kind) {
    case RecordedKind::kOutput:
      if (difference.inputs_agree) return {call_of(seen)};
      return {};
    case RecordedKind::kInput:
      return around(seen, run);
    case RecordedKind::kOutputGradient: {
      auto calls = takers_of(seen, difference.copy, run);
      for (auto& call : around(seen, run)) calls.push_back(std::move(call));
      return calls;
    }
    case RecordedKind::kGradient:
      return owner_of(seen, run);
    case RecordedKind::kParameter:
    case RecordedKind::kState:
      return {{seen.step, -1, std::string(parameter_of(seen.name)), 0}};
    default:
      return {};
  }
}

std::string reads_apart(const std::vector<RankRecording>& first, const std::vector<RankRecording>& second,
                        const Difference& difference, const std::vector<CallName>& calls, double tolerance) {
  const Seen& seen = difference.seen;
  const bool is_update = seen.kind == RecordedKind::kParameter || seen.kind == RecordedKind::kState;
  std::string agreeing;
  for (const auto& call : calls) {
    const Reads* one = reads_of(first, call, difference.copy, difference.rank);
    const Reads* other = reads_of(second, call, difference.copy, -1);
    if (one == nullptr || other == nullptr) continue;
    const auto& name = std::get<std::string>(call);
    const std::string where = is_update || seen.kind == RecordedKind::kOutput || name == module_of(seen)
                                  ? ""
                                  : base::str(", in the code of ", name.empty() ? "the model" : name);
    const auto found = all_apart(*one, *other, tolerance);
    if (!found.empty()) return base::str(where, is_update ? ": its update took " : ": it reads ", joined(found));
    if (agreeing.empty()) {
      agreeing = is_update ? "; the options of its optimizer agree" : where + "; what it was seen to read agrees";
    }
  }
  return seen.kind == RecordedKind::kOutputGradient && calls.size() > 1 && !agreeing.empty()
             ? "; what the modules after it were seen to read agrees"
             : agreeing;
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
  const auto [least, most] = std::ranges::minmax(run, {}, &RankRecording::steps);
  if (least.ended && least.steps < most.steps) {
    found.push_back(base::str(name, ": rank ", least.rank, " has recorded ", counted(least.steps, "step"), ", rank ",
                              most.rank, " ", most.steps));
  }
  std::vector<base::Rank> absent;
  for (std::int64_t rank = 0; rank < run.front().world; ++rank) {
    if (!here.contains(rank)) absent.emplace_back(static_cast<int>(rank));
  }
  if (!absent.empty()) found.push_back(base::str(name, ": there is no recording of ", base::name_ranks(absent)));
  return found;
}

}  // namespace lamina::digests
