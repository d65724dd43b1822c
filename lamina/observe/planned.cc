// SPDX-License-Identifier: Apache-2.0
#include "lamina/observe/planned.h"

#include <algorithm>
#include <map>
#include <optional>

#include "lamina/schedule/simulation.h"

namespace lamina::observe {
namespace {

struct TimeSpan {
  std::int64_t rank;
  const Event* event;
  std::int64_t begin_ns;  // in the clock of rank 0
  std::int64_t duration() const { return event->end_ns - event->begin_ns; }
};

// One step of one pipeline.
struct Course {
  std::optional<std::int64_t> begin_ns;                         // unknown where the record of the step was dropped
  std::map<std::int64_t, std::vector<TimeSpan>> by_microbatch;  // in the order of their beginnings
};

using Courses = std::map<std::pair<std::int64_t, std::int64_t>, Course>;  // by leader and step

Courses courses_of(const Timeline& timeline) {
  Courses courses;
  for (const auto& record : timeline.ranks) {
    for (const auto& event : record.events) {
      Course& course = courses[{record.leader, event.step}];
      const auto begin = event.begin_ns - record.ahead_ns;
      if (event.what == What::kStep && record.rank == record.leader) course.begin_ns = begin;
      if (is_turn(event.what)) course.by_microbatch[event.microbatch].push_back({record.rank, &event, begin});
    }
  }
  for (auto& [key, course] : courses) {
    for (auto& [microbatch, spans] : course.by_microbatch) std::ranges::sort(spans, {}, &TimeSpan::begin_ns);
  }
  return courses;
}

// The part of a microbatch's forward, or backward, that one rank did before another one went on.
struct PlannedRun {
  std::int64_t rank;
  std::int64_t duration;
};

std::vector<PlannedRun> runs_of(const std::vector<TimeSpan>& spans, What what) {
  std::vector<PlannedRun> runs;
  for (const auto& span : spans) {
    if (span.event->what != what) continue;
    if (runs.empty() || runs.back().rank != span.rank) runs.push_back({span.rank, 0});
    runs.back().duration += span.duration();
  }
  if (what == What::kBackward) std::ranges::reverse(runs);
  return runs;
}

std::vector<std::int64_t> ranks_of(const std::vector<PlannedRun>& runs) {
  std::vector<std::int64_t> ranks;
  for (const auto& run : runs) ranks.push_back(run.rank);
  return ranks;
}

// The way that most microbatches take through the ranks.
std::vector<std::int64_t> way_of(const Course& course) {
  std::map<std::vector<std::int64_t>, int> taken;
  for (const auto& [microbatch, spans] : course.by_microbatch) ++taken[ranks_of(runs_of(spans, What::kForward))];
  return std::ranges::max_element(taken, {}, [](const auto& way) { return way.second; })->first;
}

// Average time of each visit of the way: what its rank took in all, shared among the rank's visits as it was by
// the microbatches that took this way.
std::vector<std::int64_t> durations_of(const Course& course, const std::vector<std::int64_t>& way, What what) {
  std::vector<double> parts(way.size());
  std::map<std::int64_t, double> totals, sums, visits;
  for (const auto& [microbatch, spans] : course.by_microbatch) {
    const auto runs = runs_of(spans, what);
    const bool usual = ranks_of(runs) == way;
    for (std::size_t i = 0; i < runs.size(); ++i) {
      const auto duration = static_cast<double>(runs[i].duration);
      totals[runs[i].rank] += duration / static_cast<double>(course.by_microbatch.size());
      if (usual) parts[i] += duration;
      if (usual) sums[runs[i].rank] += duration;
    }
  }
  for (auto rank : way) ++visits[rank];
  std::vector<std::int64_t> durations;
  for (std::size_t i = 0; i < way.size(); ++i) {
    const double share = sums[way[i]] > 0 ? parts[i] / sums[way[i]] : 1 / visits[way[i]];
    durations.push_back(static_cast<std::int64_t>(totals[way[i]] * share));
  }
  return durations;
}

// Gives the backwards that were split their weight parts back, and each visit the average of these. A rank has it at
// its visits as it has the time of backwards.
void add_weights(const Course& course, std::vector<schedule::Visit>& visits) {
  std::map<std::int64_t, double> totals, backwards, count;
  double split = 0;
  for (const auto& [microbatch, spans] : course.by_microbatch) {
    const auto runs = runs_of(spans, What::kWeights);
    split += runs.empty() ? 0 : 1;
    for (const auto& run : runs) totals[run.rank] += static_cast<double>(run.duration);
  }
  if (split == 0) return;
  for (const auto& visit : visits) {
    backwards[visit.rank] += static_cast<double>(visit.backward);
    ++count[visit.rank];
  }
  for (auto& visit : visits) {
    const double all = backwards[visit.rank];
    const double share = all > 0 ? static_cast<double>(visit.backward) / all : 1 / count[visit.rank];
    const double weights = totals[visit.rank] * share;
    visit.backward += static_cast<std::int64_t>(weights / static_cast<double>(course.by_microbatch.size()));
    visit.weights = std::min(visit.backward, static_cast<std::int64_t>(weights / split));
  }
}

// The visits of a microbatch, with the ranks of the job as they are numbered in `members`.
schedule::Chain chain_of(const Course& course, const std::vector<std::int64_t>& members) {
  const auto way = way_of(course);
  const auto forward = durations_of(course, way, What::kForward);
  const auto backward = durations_of(course, way, What::kBackward);
  schedule::Chain chain;
  chain.microbatches = static_cast<int>(course.by_microbatch.size());
  for (std::size_t i = 0; i < way.size(); ++i) {
    chain.visits.push_back({.rank = static_cast<int>(way[i]), .forward = forward[i], .backward = backward[i]});
  }
  add_weights(course, chain.visits);
  for (auto& visit : chain.visits) {
    visit.rank = static_cast<int>(std::ranges::find(members, visit.rank) - members.begin());
  }
  return chain;
}

}  // namespace

std::vector<PlannedEvent> planned_events(const Timeline& timeline) {
  std::vector<PlannedEvent> planned;
  for (const auto& [key, course] : courses_of(timeline)) {
    const auto& [leader, step] = key;
    std::vector<std::int64_t> members{leader};
    for (const auto& record : timeline.ranks) {
      if (record.leader == leader && record.rank != leader) members.push_back(record.rank);
    }
    if (!course.begin_ns || course.by_microbatch.empty()) continue;
    const auto chain = chain_of(course, members);
    // A chain begins on the leader, whose events may have been dropped.
    if (chain.visits.size() < 2 || chain.visits.front().rank != 0) continue;
    const auto schedule = schedule::make_schedule(timeline.schedule, static_cast<int>(timeline.active_microbatches),
                                                  static_cast<int>(members.size()));
    for (const auto& turn : schedule::simulate(*schedule, chain)) {
      if (turn.end == turn.start) continue;
      planned.push_back({members[turn.rank],
                         {.what = what_of(schedule::kind_of(turn.ticket.phase)),
                          .begin_ns = *course.begin_ns + turn.start,
                          .end_ns = *course.begin_ns + turn.end,
                          .step = step,
                          .microbatch = turn.ticket.microbatch.value}});
    }
  }
  return planned;
}

}  // namespace lamina::observe
