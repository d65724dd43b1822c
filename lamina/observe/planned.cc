// SPDX-License-Identifier: Apache-2.0
#include "lamina/observe/planned.h"

#include <algorithm>
#include <map>

#include "lamina/plan/simulation.h"

namespace lamina::observe {
namespace {

struct Span {
  std::int64_t rank;
  const Event* event;
  std::int64_t begin_ns;  // in the clock of rank 0
  std::int64_t duration() const { return event->end_ns - event->begin_ns; }
};

// One step of one pipeline.
struct Course {
  std::int64_t begin_ns = 0;
  std::map<std::int64_t, std::vector<Span>> by_microbatch;  // in the order of their beginnings
};

using Courses = std::map<std::pair<std::int64_t, std::int64_t>, Course>;  // by leader and step

Courses courses_of(const Timeline& timeline) {
  Courses courses;
  for (const auto& record : timeline.ranks) {
    for (const auto& event : record.events) {
      Course& course = courses[{record.leader, event.step}];
      const auto begin = event.begin_ns - record.ahead_ns;
      if (event.what == What::kStep && record.rank == record.leader) course.begin_ns = begin;
      const bool computes = event.what == What::kForward || event.what == What::kBackward;
      if (computes) course.by_microbatch[event.microbatch].push_back({record.rank, &event, begin});
    }
  }
  for (auto& [key, course] : courses) {
    for (auto& [microbatch, spans] : course.by_microbatch) std::ranges::sort(spans, {}, &Span::begin_ns);
  }
  return courses;
}

// The visits of a microbatch, with the ranks of the job as they are numbered in `members`.
plan::Chain chain_of(const Course& course, const std::vector<std::int64_t>& members) {
  const auto place = [&](std::int64_t rank) {
    return static_cast<int>(std::ranges::find(members, rank) - members.begin());
  };
  plan::Chain chain;
  chain.visits.push_back({.rank = 0, .forward = 0, .backward = 0});
  for (const auto& span : course.by_microbatch.begin()->second) {
    if (span.event->what != What::kForward) continue;
    if (place(span.rank) != chain.visits.back().rank) {
      chain.visits.push_back({.rank = place(span.rank), .forward = 0, .backward = 0});
    }
  }
  chain.microbatches = static_cast<int>(course.by_microbatch.size());
  std::map<int, std::int64_t> visits;
  for (const auto& visit : chain.visits) ++visits[visit.rank];
  std::map<int, std::pair<std::int64_t, std::int64_t>> totals;  // forward and backward per rank, all microbatches
  for (const auto& [microbatch, spans] : course.by_microbatch) {
    for (const auto& span : spans) {
      auto& [forward, backward] = totals[place(span.rank)];
      (span.event->what == What::kForward ? forward : backward) += span.duration();
    }
  }
  for (auto& visit : chain.visits) {
    const auto shares = visits[visit.rank] * chain.microbatches;
    visit.forward = totals[visit.rank].first / shares;
    visit.backward = totals[visit.rank].second / shares;
  }
  return chain;
}

}  // namespace

std::vector<PlannedEvent> planned_events(const Timeline& timeline) {
  const auto schedule = plan::make_schedule(timeline.schedule, static_cast<int>(timeline.active_microbatches));
  std::vector<PlannedEvent> planned;
  for (const auto& [key, course] : courses_of(timeline)) {
    const auto& [leader, step] = key;
    std::vector<std::int64_t> members{leader};
    for (const auto& record : timeline.ranks) {
      if (record.leader == leader && record.rank != leader) members.push_back(record.rank);
    }
    if (course.by_microbatch.empty()) continue;
    const auto chain = chain_of(course, members);
    if (chain.visits.size() < 2) continue;
    for (const auto& turn : plan::simulate(*schedule, chain)) {
      if (turn.end == turn.start) continue;
      const bool backward = turn.ticket.phase == plan::Phase::kBackward;
      planned.push_back({members[turn.rank],
                         {.what = backward ? What::kBackward : What::kForward,
                          .begin_ns = course.begin_ns + turn.start,
                          .end_ns = course.begin_ns + turn.end,
                          .step = step,
                          .microbatch = turn.ticket.microbatch.value}});
    }
  }
  return planned;
}

}  // namespace lamina::observe
