// SPDX-License-Identifier: Apache-2.0
#include "lamina/digests/comparison.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <limits>
#include <map>
#include <set>
#include <string_view>
#include <tuple>
#include <utility>

#include "lamina/base/error.h"
#include "lamina/base/str.h"

namespace lamina::digests {
namespace {

constexpr double kInfinite = std::numeric_limits<double>::infinity();

bool is_of_call(Kind kind) { return kind <= Kind::kOutputGradient; }
// Parts of these may lie on ranks of several copies of the model.
bool is_of_model(Kind kind) { return kind >= Kind::kGradient && kind <= Kind::kState; }

// A tensor of a run. One of the model has no copy, for its parts may lie in several.
struct Key {
  std::int64_t step, copy, microbatch;
  Kind kind;
  std::string_view name;
  std::int64_t call, index;

  auto operator<=>(const Key&) const = default;
};

struct Part {
  const RankRecording* rank;
  const Seen* seen;
};

using Run = std::vector<RankRecording>;
using Parts = std::map<Key, std::vector<Part>>;

Parts parts_of(const Run& run) {
  Parts parts;
  for (const auto& rank : run) {
    for (const auto& seen : rank.seen) {
      const std::int64_t copy = is_of_model(seen.kind) ? -1 : rank.copy;
      parts[{seen.step, copy, seen.microbatch, seen.kind, seen.name, seen.call, seen.index}].push_back({&rank, &seen});
    }
  }
  return parts;
}

// A whole tensor, put together of what ranks have of it.
struct Whole {
  Digest digest;
  Part of;               // the first part
  bool is_part = false;  // there are others
};

// Each whole tensor that these parts make, the one of the first ranks first; parts that lack their neighbours are left
// out.
std::vector<Whole> wholes_of(const std::vector<Part>& parts) {
  std::map<std::int64_t, std::vector<Part>> by_begin;
  for (const auto& part : parts) by_begin[part.seen->digest.begin].push_back(part);
  std::size_t most = 0;
  for (const auto& [begin, group] : by_begin) most = std::max(most, group.size());
  std::vector<Whole> wholes;
  for (std::size_t number = 0; number < most; ++number) {
    Whole whole;
    std::int64_t at = 0;
    bool over = false;
    for (auto group = by_begin.find(0); group != by_begin.end() && !over; group = by_begin.find(at)) {
      const Part& part = group->second[std::min(number, group->second.size() - 1)];
      const Digest& digest = part.seen->digest;
      if (at == 0) {
        whole = {digest, part};
      } else {
        add(whole.digest, digest);
        whole.is_part = true;
      }
      at += digest.elements;
      over = at >= digest.whole() || digest.elements == 0;
    }
    if (over) wholes.push_back(std::move(whole));
  }
  return wholes;
}

// A run, with sizes that differences are measured by.
class Sizes {
 public:
  explicit Sizes(const Parts& parts) {
    for (const auto& [key, list] : parts) {
      const Seen& seen = *list.front().seen;
      double& most = largest_[group(seen)];
      most = std::max(most, seen.digest.norm());
      if (seen.kind == Kind::kGradient) note_small(seen, list);
      if (seen.kind == Kind::kParameter && seen.step < 0) initial_.emplace(seen.name, list);
    }
  }

  // A norm below which a tensor is taken to be no more than what rounding left of others of its kind.
  double floor(const Seen& seen) const {
    if (seen.kind == Kind::kParameter || seen.kind == Kind::kBuffer || seen.kind == Kind::kResult) return 0;
    const auto found = largest_.find(group(seen));
    const bool is_gradient = seen.kind != Kind::kInput && seen.kind != Kind::kOutput;
    return found == largest_.end() ? 0 : found->second * (is_gradient ? 0.1 : 1e-3);
  }

  // Estimates what an update makes of rounding: an optimizer that divides gradients by their size gives a small one as
  // much weight as any other.
  double amplified(const Seen& seen, const Digest& now, double tolerance) const {
    const auto before = initial_.find(seen.name);
    if (seen.kind != Kind::kParameter || seen.step < 0 || before == initial_.end()) return 0;
    const auto wholes = wholes_of(before->second);
    if (wholes.empty()) return 0;
    double squares = 0;
    for (int i = 0; i < kProjections; ++i) {
      squares += std::pow(now.projections[i] - wholes.front().digest.projections[i], 2) / kProjections;
    }
    const auto small = small_.find(seen.name);
    const double share = small == small_.end() ? 0 : std::sqrt(small->second);
    return std::sqrt(squares) * (std::min(0.5, 100 * tolerance) + 4 * share);
  }

 private:
  using Group = std::tuple<std::int64_t, std::int64_t, Kind, std::string>;

  static Group group(const Seen& seen) {
    const Kind kind = seen.kind == Kind::kInput ? Kind::kOutput : seen.kind;
    const auto space = seen.name.rfind(' ');
    return {seen.step, seen.microbatch, kind, seen.kind == Kind::kState ? seen.name.substr(space + 1) : ""};
  }

  void note_small(const Seen& seen, const std::vector<Part>& list) {
    for (const auto& whole : wholes_of(list)) {
      if (whole.digest.elements == 0) continue;
      const double share = static_cast<double>(whole.digest.small) / static_cast<double>(whole.digest.elements);
      double& most = small_[seen.name];
      most = std::max(most, share);
    }
  }

  std::map<Group, double> largest_;
  std::map<std::string, double, std::less<>> small_;  // the largest share of elements, by the parameter's name
  std::map<std::string, std::vector<Part>, std::less<>> initial_;
};

template <class Numbers>
std::string listed(const Numbers& numbers) {
  std::string text;
  for (const auto each : numbers) text += base::str(text.empty() ? "" : ", ", each);
  return base::str("[", text, "]");
}

struct Compared {
  double relative = 0;
  std::string what;  // "" where they agree
};

class Comparer {
 public:
  Comparer(const Run& first, const Run& second, const Terms& terms)
      : terms_(terms), first_(parts_of(first)), second_(parts_of(second)), sizes_(second_) {
    made_.wanted = terms.steps;
    made_.tolerance = terms.tolerance.value_or(std::max(tolerance_of(first), tolerance_of(second)));
  }

  Comparison compare() {
    std::set<std::string_view> modules, parameters;
    std::set<std::int64_t> steps;
    for (const auto& [key, parts] : second_) {
      const auto other = first_.find(key);
      if (other == first_.end()) continue;
      const auto wholes = wholes_of(parts);
      const auto others = wholes_of(other->second);
      if (wholes.empty() || others.empty() || began_elsewhere(key)) continue;
      for (std::size_t i = 0; i < others.size(); ++i) compare(others[i], wholes[std::min(i, wholes.size() - 1)], key);
      ++made_.tensors;
      if (is_of_call(key.kind)) modules.insert(key.name);
      if (key.kind == Kind::kParameter) parameters.insert(key.name);
      if (key.step >= 0) steps.insert(key.step);
    }
    if (made_.tensors == 0) throw base::Error("the two runs have nothing in common that was recorded");
    made_.modules = static_cast<std::int64_t>(modules.size());
    made_.parameters = static_cast<std::int64_t>(parameters.size());
    made_.steps = static_cast<std::int64_t>(steps.size());
    std::ranges::stable_sort(made_.differences, {}, [](const Difference& each) {
      return std::tuple(each.seen.step, each.seen.kind > Kind::kResult, each.seen.microbatch, each.seen.order);
    });
    for (auto& each : made_.differences) explain(each);
    return std::move(made_);
  }

 private:
  Compared compare(const Digest& first, const Digest& second, const Seen& seen) const {
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
    const double scale = std::max({first.norm(), second.norm(), sizes_.floor(seen)});
    const double relative = apart == 0 || scale == 0 ? 0 : apart / scale;
    if (terms_.bits) return {relative, first.bits == second.bits ? "" : "has other bits, by " + size_text(relative)};
    const double tolerated = made_.tolerance * static_cast<double>(std::max<std::int64_t>(seen.step, 0) + 1);
    const double excess = apart - sizes_.amplified(seen, second, made_.tolerance);
    return {relative, excess > tolerated * scale ? "differs by " + size_text(relative) : ""};
  }

  // True of a generator that was at another place before the first step, as one is that no script has seeded.
  bool began_elsewhere(const Key& key) const {
    if (key.kind != Kind::kGenerator) return false;
    Key at_first = key;
    at_first.step = -1;
    const auto first = first_.find(at_first), second = second_.find(at_first);
    return first == first_.end() || second == second_.end() ||
           first->second.front().seen->digest != second->second.front().seen->digest;
  }

  void compare(const Whole& first, const Whole& second, const Key& key) {
    const Seen& seen = *second.of.seen;
    auto [relative, what] = compare(first.digest, second.digest, seen);
    if (what.empty()) {
      if (relative > made_.largest || made_.largest_of.empty()) {
        made_.largest = std::max(made_.largest, relative);
        made_.largest_of = named(seen);
      }
      return;
    }
    Difference difference{.seen = seen, .copy = first.of.rank->copy, .relative = relative, .what = std::move(what)};
    if (!first.is_part) difference.rank = first.of.rank->rank;
    if (key.kind == Kind::kOutput) {
      difference.first = surroundings(first.of);
      difference.second = surroundings(second.of);
    }
    made_.differences.push_back(std::move(difference));
  }

  static std::optional<Surroundings> surroundings(const Part& of) {
    const auto found = of.rank->calls.find(call_of(*of.seen));
    return found == of.rank->calls.end() ? std::nullopt : std::optional(found->second);
  }

  // Says of an output whether all that went into its call agrees.
  void explain(Difference& difference) const {
    if (difference.seen.kind != Kind::kOutput) return;
    bool differs = false;
    for (const auto& other : made_.differences) {
      const Seen& seen = other.seen;
      differs |=
          seen.kind == Kind::kInput && other.copy == difference.copy && call_of(seen) == call_of(difference.seen);
    }
    difference.inputs_agree = !differs;
  }

  const Terms terms_;
  const Parts first_, second_;
  const Sizes sizes_;
  Comparison made_;
};

}  // namespace

double distance(const Digest& first, const Digest& second) {
  double squares = 0;
  for (int i = 0; i < kProjections; ++i) squares += std::pow(first.projections[i] - second.projections[i], 2);
  return std::max(std::abs(first.norm() - second.norm()), std::sqrt(squares / kProjections));
}

std::string size_text(double relative) {
  std::array<char, 32> text;
  std::snprintf(text.data(), text.size(), "%.0e", relative);
  return text.data();
}

double tolerance_of(const Run& run) {
  static const std::map<std::string_view, double> of_dtype{
      {"bfloat16", 1e-1}, {"float16", 2e-2}, {"float32", 1e-4}, {"complex64", 1e-4}};
  double most = 1e-9;
  for (const auto& rank : run) {
    for (const auto& seen : rank.seen) {
      const auto found = of_dtype.find(seen.digest.dtype);
      if (found != of_dtype.end()) most = std::max(most, found->second);
    }
  }
  return most;
}

Comparison compare(const Run& first, const Run& second, const Terms& terms) {
  return Comparer(first, second, terms).compare();
}

}  // namespace lamina::digests
