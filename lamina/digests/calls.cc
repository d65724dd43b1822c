// SPDX-License-Identifier: Apache-2.0
#include "lamina/digests/calls.h"

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <string_view>
#include <tuple>
#include <utility>

namespace lamina::digests {
namespace {

using Module = std::tuple<std::int64_t, std::int64_t, std::int64_t, std::string_view>;  // step, copy, microbatch, name
using CallOnRank = std::pair<std::int64_t, std::int64_t>;                               // number, rank
using SeenTensors = std::map<std::int64_t, const Seen*>;                                // by their index

// The tensors by which a call is known.
struct Known {
  SeenTensors inputs, gradients;
};
using Calls = std::map<CallOnRank, Known>;

// The number that a call gets, and those that its inputs get.
struct Renamed {
  std::int64_t number;
  std::map<std::int64_t, std::int64_t> inputs;
};
using RenamedCalls = std::map<CallOnRank, Renamed>;

std::map<Module, Calls> calls_of(const RecordedParts& parts) {
  std::map<Module, Calls> modules;
  for (const auto& [key, list] : parts) {
    if (key.kind != RecordedKind::kInput && key.kind != RecordedKind::kOutputGradient) continue;
    Calls& calls = modules[{key.step, key.copy, key.microbatch, key.name}];
    for (const auto& part : list) {
      Known& known = calls[{key.call, part.rank->rank}];
      (key.kind == RecordedKind::kInput ? known.inputs : known.gradients)[key.index] = part.seen;
    }
  }
  // Calls of which no input was seen keep their numbers.
  for (auto& [module, calls] : modules)
    std::erase_if(calls, [](const auto& each) { return each.second.inputs.empty(); });
  return modules;
}

constexpr double kRounding = 1e-6;

// The calls of one module in a microbatch.
class Matching {
 public:
  Matching(const Calls& first, const Calls& second, const Measure& measure)
      : first_(first), second_(second), measure_(measure) {}

  RenamedCalls made() {
    for (const auto& [call, known] : second_) take(call, known);
    for (const auto& [call, known] : second_) {
      if (matched_.contains(call.first)) continue;
      const auto left = std::ranges::find_if(first_, [&](const auto& each) { return !names_.contains(each.first); });
      if (left == first_.end()) break;
      names_[left->first] = {call.first, {}};
    }
    return std::move(names_);
  }

 private:
  // Takes the call with the same inputs that is nearest; of equally near ones that of the same number.
  void take(const CallOnRank& call, const Known& known) {
    if (matched_.contains(call.first)) return;
    std::optional<CallOnRank> best;
    std::pair<double, bool> least;
    Renamed renamed{call.first, {}};
    for (const auto& [other, others] : first_) {
      if (names_.contains(other)) continue;
      auto indices = by_index(others.inputs, known.inputs);
      if (!indices) continue;
      const std::pair apart(apart_by(others, known, *indices), other.first != call.first);
      if (best && least <= apart) continue;
      best = other, least = apart, renamed.inputs = std::move(*indices);
    }
    if (!best) return;
    names_[*best] = std::move(renamed);
    matched_.insert(call.first);
  }

  // Measures how far two calls are apart, in inputs with these places and in gradients of what they returned. Calls
  // that a checkpoint runs again have a gradient, those before have none.
  static double apart_by(const Known& first, const Known& second, const std::map<std::int64_t, std::int64_t>& indices) {
    double sum = 0;
    for (const auto& [index, other] : indices) sum += relative(*first.inputs.at(index), *second.inputs.at(other));
    for (const auto& [index, seen] : second.gradients) {
      const auto same = first.gradients.find(index);
      sum += same == first.gradients.end() ? 1 : relative(*same->second, *seen);
    }
    for (const auto& [index, seen] : first.gradients) sum += second.gradients.contains(index) ? 0 : 1;
    return sum < kRounding ? 0 : sum;
  }

  static double relative(const Seen& first, const Seen& second) {
    const double scale = std::max(first.digest.norm(), second.digest.norm());
    return scale == 0 ? 0 : distance(first.digest, second.digest) / scale;
  }

  // The places of the second call's inputs among those of the first one; nothing where one is not among them.
  std::optional<std::map<std::int64_t, std::int64_t>> by_index(const SeenTensors& first,
                                                               const SeenTensors& second) const {
    std::map<std::int64_t, std::int64_t> indices;
    for (const auto& [index, seen] : second) {
      const auto same = first.find(index);
      if (same != first.end() && agree(*same->second, *seen)) {
        indices[index] = index;
        continue;
      }
      if (first.size() == second.size()) return std::nullopt;
      const auto found = std::ranges::find_if(
          first, [&](const auto& each) { return !indices.contains(each.first) && agree(*each.second, *seen); });
      if (found == first.end()) return std::nullopt;
      indices[found->first] = index;
    }
    return indices;
  }

  bool agree(const Seen& first, const Seen& second) const {
    return measure_.compare(first.digest, second.digest, second).what.empty();
  }

  const Calls& first_;
  const Calls& second_;
  const Measure& measure_;
  RenamedCalls names_;
  std::set<std::int64_t> matched_;  // numbers of the second run's calls
};

}  // namespace

RecordedParts matched(const RecordedParts& first, const RecordedParts& second, const Measure& measure) {
  std::map<Module, RenamedCalls> names;
  const auto first_calls = calls_of(first);
  for (const auto& [module, calls] : calls_of(second)) {
    const auto found = first_calls.find(module);
    if (found != first_calls.end()) names[module] = Matching(found->second, calls, measure).made();
  }
  RecordedParts made;
  for (const auto& [key, list] : first) {
    const auto module = names.find({key.step, key.copy, key.microbatch, key.name});
    if (!is_of_call(key.kind) || module == names.end()) {
      made[key] = list;
      continue;
    }
    for (const auto& part : list) {
      Key renamed = key;
      const auto name = module->second.find({key.call, part.rank->rank});
      if (name != module->second.end()) {
        renamed.call = name->second.number;
        const auto& inputs = name->second.inputs;
        if (key.kind == RecordedKind::kInput && !inputs.empty()) {
          const auto input = inputs.find(key.index);
          if (input == inputs.end()) continue;
          renamed.index = input->second;
        }
      }
      made[renamed].push_back(part);
    }
  }
  return made;
}

}  // namespace lamina::digests
