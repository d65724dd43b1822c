// SPDX-License-Identifier: Apache-2.0
#include "lamina/observe/summary.h"

#include <algorithm>
#include <iterator>

#include "lamina/base/str.h"
#include "lamina/observe/planned.h"

namespace lamina::observe {
namespace {

bool computes(const Event& event) { return is_turn(event.what); }

std::int64_t duration(const Event& event) { return event.end_ns - event.begin_ns; }

std::int64_t median(std::vector<std::int64_t> values) {
  if (values.empty()) return 0;
  std::ranges::sort(values);
  return values[values.size() / 2];
}

// The first step that counts.
std::int64_t first_step(const Timeline& timeline) {
  std::vector<std::int64_t> steps;
  for (const auto& record : timeline.ranks) {
    for (const auto& event : record.events) {
      if (event.what == What::kStep) steps.push_back(event.step);
    }
  }
  if (steps.empty()) return 0;
  const auto [least, most] = std::ranges::minmax(steps);
  return least == most ? least : least + 1;
}

// Adds up one step of one rank.
class StepOfRank {
 public:
  StepOfRank(const RankRecord& record, const Event& step, RankSummary& into) : step_(step), into_(into) {
    for (const auto& event : record.events) {
      if (event.step != step.step) continue;
      if (computes(event)) turns_.push_back(&event);
      if (event.what == What::kReceive && event.peer != record.rank) arrivals_.push_back(&event);
    }
    std::ranges::sort(turns_, {}, &Event::begin_ns);
    std::ranges::sort(arrivals_, {}, &Event::begin_ns);
  }

  void add() {
    into_.step_ns += duration(step_);
    std::int64_t idle_from = step_.begin_ns;
    for (const Event* turn : turns_) {
      into_.compute_ns += duration(*turn);
      idle(idle_from, turn->begin_ns);
      idle_from = turn->end_ns;
    }
    idle(idle_from, step_.end_ns);
  }

 private:
  // The message that ended the wait tells whom it was for.
  void idle(std::int64_t from, std::int64_t to) {
    if (to <= from) return;
    const auto after = std::ranges::upper_bound(arrivals_, to, {}, &Event::begin_ns);
    const Event* last = after == arrivals_.begin() ? nullptr : *std::prev(after);
    std::string why = "between two turns of its own";
    if (to == step_.end_ns) {
      why = "end of the step";
    } else if (last != nullptr && last->begin_ns >= from) {
      why = base::str("waiting for rank ", last->peer);
    } else if (from == step_.begin_ns) {
      why = "start of the step";
    }
    into_.idle_ns[why] += to - from;
  }

  const Event& step_;
  RankSummary& into_;
  std::vector<const Event*> turns_;
  std::vector<const Event*> arrivals_;
};

RankSummary summarise(const RankRecord& record, std::int64_t first) {
  RankSummary summary{.rank = record.rank, .dropped = record.dropped};
  for (const auto& event : record.events) {
    if (event.what == What::kMemory) summary.peak_bytes = std::max(summary.peak_bytes, event.bytes);
    if (event.step < first) continue;
    if (event.what == What::kStep) StepOfRank(record, event, summary).add();
    if (event.what != What::kSend) continue;
    ++summary.messages;
    summary.bytes += event.bytes;
  }
  return summary;
}

std::vector<ModuleSummary> modules_of(const Timeline& timeline, std::int64_t first) {
  std::map<std::pair<std::int64_t, std::string>, ModuleSummary> modules;
  for (const auto& record : timeline.ranks) {
    for (const auto& event : record.events) {
      if (!computes(event) || event.step < first) continue;
      ModuleSummary& module = modules[{record.rank, event.name}];
      module.name = event.name;
      module.rank = record.rank;
      (event.what == What::kForward ? module.forward_ns : module.backward_ns) += duration(event);
    }
  }
  std::vector<ModuleSummary> found;
  for (auto& [key, module] : modules) found.push_back(std::move(module));
  std::ranges::stable_sort(found, std::greater(), &ModuleSummary::total_ns);
  return found;
}

std::int64_t planned_ns(const Timeline& timeline, std::int64_t first) {
  std::map<std::int64_t, std::pair<std::int64_t, std::int64_t>> steps;  // begin and end, of the whole job
  for (const auto& [rank, event] : planned_events(timeline)) {
    if (event.step < first) continue;
    auto [step, fresh] = steps.try_emplace(event.step, event.begin_ns, event.end_ns);
    step->second.first = std::min(step->second.first, event.begin_ns);
    step->second.second = std::max(step->second.second, event.end_ns);
  }
  std::vector<std::int64_t> durations;
  for (const auto& [step, span] : steps) durations.push_back(span.second - span.first);
  return median(std::move(durations));
}

}  // namespace

Summary summarise(const Timeline& timeline) {
  const auto first = first_step(timeline);
  Summary summary;
  std::vector<std::int64_t> led;
  for (const auto& record : timeline.ranks) {
    summary.ranks.push_back(summarise(record, first));
    summary.bubble += summary.ranks.back().bubble() / static_cast<double>(timeline.ranks.size());
    for (const auto& event : record.events) {
      if (event.what == What::kStep && record.rank == record.leader && event.step >= first)
        led.push_back(duration(event));
    }
  }
  const auto leaders =
      std::ranges::count_if(timeline.ranks, [](const auto& record) { return record.rank == record.leader; });
  summary.steps = leaders == 0 ? 0 : std::ssize(led) / leaders;
  summary.step_ns = median(std::move(led));
  summary.planned_ns = planned_ns(timeline, first);
  summary.modules = modules_of(timeline, first);
  return summary;
}

}  // namespace lamina::observe
