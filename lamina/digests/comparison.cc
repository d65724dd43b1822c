// SPDX-License-Identifier: Apache-2.0
#include "lamina/digests/comparison.h"

#include <algorithm>
#include <limits>
#include <set>
#include <string_view>
#include <tuple>
#include <utility>

#include "lamina/base/error.h"
#include "lamina/base/str.h"
#include "lamina/digests/calls.h"
#include "lamina/digests/wholes.h"

namespace lamina::digests {
namespace {

// True of a slice and the whole: alike in all dimensions but one, of which the slice has less.
bool is_slice(const Digest& slice, const Digest& whole) {
  if (slice.shape.size() != whole.shape.size()) return false;
  std::int64_t differing = 0;
  for (std::size_t i = 0; i < whole.shape.size(); ++i) {
    if (slice.shape[i] > whole.shape[i]) return false;
    differing += static_cast<std::int64_t>(slice.shape[i] < whole.shape[i]);
  }
  return differing == 1;
}

// All calls of a module in a microbatch of a step, or a tensor of the model. Calls need not have the same numbers in
// both runs, nor the same gradients: see [Note: matched calls].
using TensorPlace = std::tuple<std::int64_t, std::int64_t, std::int64_t, RecordedKind, std::string_view>;
TensorPlace place_of(const Key& key) {
  return {key.step, key.copy, key.microbatch, is_of_call(key.kind) ? RecordedKind::kOutput : key.kind, key.name};
}

// Copies and microbatches that a run has recorded; -1 is the whole model, and a whole step.
struct DifferenceExtent {
  std::set<std::int64_t> copies{-1}, microbatches{-1};

  explicit DifferenceExtent(const RecordedParts& parts) {
    for (const auto& [key, list] : parts) {
      copies.insert(key.copy);
      microbatches.insert(key.microbatch);
    }
  }
  bool has(const Key& key) const { return copies.contains(key.copy) && microbatches.contains(key.microbatch); }
};

class Comparer {
 public:
  Comparer(const RankRecordings& first, const RankRecordings& second, const ComparisonOptions& options)
      : Comparer(first, second, options, parts_of(first)) {}

  Comparer(const RankRecordings& first, const RankRecordings& second, const ComparisonOptions& options,
           const RecordedParts& first_as_seen)
      : second_(parts_of(second)),
        tolerance_(options.tolerance.value_or(std::max(tolerance_of(first), tolerance_of(second)))),
        measure_(first_as_seen, second_, options, tolerance_),
        first_(matched(first_as_seen, second_, measure_)) {
    made_.wanted = options.steps;
    const auto slices = [](const RankRecordings& run) { return run.empty() ? 1 : run.front().slices; };
    is_sliced_ = slices(first) > slices(second);
    steps_ = std::ranges::min(first, {}, &RankRecording::steps).steps;
    second_steps_ = std::ranges::min(second, {}, &RankRecording::steps).steps;
    made_.tolerance = tolerance_;
  }

  Comparison compare() {
    std::set<std::string_view> modules;
    std::set<std::string_view> parameters;
    std::set<std::int64_t> steps;
    std::set<TensorPlace> compared;
    for (const auto& [key, parts] : second_) {
      const auto other = first_.find(key);
      if (other == first_.end()) {
        note_missing(key, parts);
        continue;
      }
      const auto wholes = wholes_of(parts);
      const auto others = wholes_of(other->second);
      if (wholes.empty() || others.empty() || began_elsewhere(key)) continue;
      for (std::size_t i = 0; i < others.size(); ++i) {
        compare(others[i], wholes[std::min(i, wholes.size() - 1)], key, has_one_rank(others));
      }
      ++made_.tensors;
      compared.insert(place_of(key));
      if (is_of_call(key.kind)) modules.insert(key.name);
      if (key.kind == RecordedKind::kParameter) parameters.insert(key.name);
      if (key.step >= 0) steps.insert(key.step);
    }
    if (made_.tensors == 0) throw base::Error("the two runs have nothing in common that was recorded");
    made_.modules = static_cast<std::int64_t>(modules.size());
    made_.parameters = static_cast<std::int64_t>(parameters.size());
    made_.steps = static_cast<std::int64_t>(steps.size());
    std::ranges::stable_sort(made_.differences, {}, [](const Difference& each) {
      return std::tuple(each.seen.step, each.seen.kind > RecordedKind::kResult, each.seen.microbatch, each.seen.order);
    });
    for (auto& each : made_.differences) explain(each);
    note_lacking(first_, second_, "second run", compared);
    note_lacking(second_, first_, "first run", compared);
    return std::move(made_);
  }

 private:
  // Notes what one run has recorded and was not compared at all: the other one has no whole of it.
  void note_lacking(const RecordedParts& parts, const RecordedParts& others, std::string_view other,
                    const std::set<TensorPlace>& compared) {
    constexpr std::size_t kNamed = 5;
    const auto both = std::min(steps_, second_steps_);
    const DifferenceExtent extent(others);
    std::set<std::string> found;
    for (const auto& [key, list] : parts) {
      if (key.kind >= RecordedKind::kState || key.step >= both || !extent.has(key))
        continue;  // faces name states otherwise
      if (compared.contains(place_of(key)) || lies_in_slices(key, compared)) continue;
      const bool is_root = is_of_call(key.kind) && key.name.empty();
      found.insert(is_of_call(key.kind) ? base::str("call of ", is_root ? "the model" : key.name)
                                        : named({.kind = key.kind, .name = std::string(key.name)}));
    }
    std::size_t number = 0;
    for (const auto& each : found) {
      if (++number > kNamed) break;
      made_.missing.push_back(base::str(other, ": there is no ", each, " that can be compared"));
    }
    if (number > kNamed) made_.missing.push_back(base::str(other, ": and of ", found.size() - kNamed, " more"));
  }

  // True of a call within a region, of which the layout records the region alone.
  bool lies_in_slices(const Key& key, const std::set<TensorPlace>& compared) const {
    if (!is_sliced_ || !is_of_call(key.kind)) return false;
    Key around = key;
    while (!around.name.empty()) {
      around.name = outer(around.name);
      if (!around.name.empty() && compared.contains(place_of(around))) return true;
    }
    return false;
  }

  // Notes a gradient that only the second run has, where the first has recorded all of that step.
  void note_missing(const Key& key, const std::vector<RecordedPart>& parts) {
    Key known = key;
    if (key.kind == RecordedKind::kOutputGradient) {
      known.kind = RecordedKind::kOutput;
    } else if (key.kind == RecordedKind::kGradient) {
      known = {-1, -1, -1, RecordedKind::kParameter, key.name, 0, 0};
    }
    const auto made = first_.find(known);
    if (known.kind == key.kind || key.step >= steps_ || made == first_.end()) return;
    made_.differences.push_back({.seen = *parts.front().seen,
                                 .copy = std::max<std::int64_t>(key.copy, 0),
                                 .relative = std::numeric_limits<double>::infinity(),
                                 .what = "is missing",
                                 .first = surroundings(made->second.front()),
                                 .second = surroundings(parts.front())});
  }

  // True of a generator that was at another place before the first step, as one is that no script has seeded.
  bool began_elsewhere(const Key& key) const {
    if (key.kind != RecordedKind::kGenerator) return false;
    Key at_first = key;
    at_first.step = -1;
    const auto first = first_.find(at_first), second = second_.find(at_first);
    return first == first_.end() || second == second_.end() ||
           first->second.front().seen->digest != second->second.front().seen->digest;
  }

  // True where somebody has seen it otherwise than all others, or nobody else: else each had a slice of it.
  static bool has_one_rank(const std::vector<Whole>& wholes) {
    return wholes.size() == 1 ||
           std::ranges::any_of(wholes, [&](const Whole& each) { return each.digest != wholes.front().digest; });
  }

  void compare(const Whole& first, const Whole& second, const Key& key, bool has_one_rank) {
    const Seen& seen = *second.of.seen;
    if (is_sliced_ && is_of_call(key.kind) && is_slice(first.digest, second.digest)) {
      ++made_.in_slices;
      return;
    }
    auto [relative, what] = measure_.compare(first.digest, second.digest, seen);
    if (what.empty()) {
      if (relative > made_.largest || made_.largest_of.empty()) {
        made_.largest = std::max(made_.largest, relative);
        made_.largest_of = named(seen);
      }
      return;
    }
    Difference difference{.seen = seen, .copy = first.of.rank->copy, .relative = relative, .what = std::move(what)};
    if (!first.is_part && has_one_rank) difference.rank = first.of.rank->rank;
    if (key.kind == RecordedKind::kOutput || key.kind == RecordedKind::kOutputGradient) {
      difference.first = surroundings(first.of);
      difference.second = surroundings(second.of);
    }
    made_.differences.push_back(std::move(difference));
  }

  static std::optional<Surroundings> surroundings(const RecordedPart& of) {
    const auto found = of.rank->calls.find(call_of(*of.seen));
    return found == of.rank->calls.end() ? std::nullopt : std::optional(found->second);
  }

  // Says of an output whether all that went into its call agrees.
  void explain(Difference& difference) const {
    if (difference.seen.kind != RecordedKind::kOutput) return;
    bool differs = false;
    for (const auto& other : made_.differences) {
      const Seen& seen = other.seen;
      differs |= seen.kind == RecordedKind::kInput && other.copy == difference.copy &&
                 call_of(seen) == call_of(difference.seen);
    }
    difference.inputs_agree = !differs;
  }

  const RecordedParts second_;
  const double tolerance_;
  const Measure measure_;
  const RecordedParts first_;
  std::int64_t steps_ = 0, second_steps_ = 0;  // that all ranks of a run have ended
  bool is_sliced_ = false;                     // the first run, more than the second
  Comparison made_;
};

}  // namespace

Comparison compare(const RankRecordings& first, const RankRecordings& second, const ComparisonOptions& options) {
  return Comparer(first, second, options).compare();
}

}  // namespace lamina::digests
