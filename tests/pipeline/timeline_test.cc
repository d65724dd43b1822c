// SPDX-License-Identifier: Apache-2.0
#include "lamina/session/timeline.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "lamina/base/error.h"
#include "lamina/observe/summary.h"
#include "lamina/observe/timeline_part.h"
#include "lamina/session/session.h"
#include "tests/messaging/mailboxes.h"
#include "tests/observe/temp_folder.h"
#include "tests/pipeline/pipeline_fixture.h"

namespace lamina::pipeline {
namespace {

using observe::Event;
using observe::RankRecord;
using observe::Timeline;
using observe::What;
using value::Value;

constexpr int kMicrobatches = 3;

at::Tensor tensor_of(const Value& tree) { return tree.as<at::Tensor>(); }

base::ModuleId add_tail(Pipeline& pipeline) {
  const auto weight = at::full({3}, 2.0, at::kDouble).set_requires_grad(true);
  return pipeline.add("tail", 1, [weight](Job&) { return [weight](Value x) { return Value(tensor_of(x) * weight); }; });
}

// Two ranks, on each of which `steps` steps are recorded.
std::vector<Timeline> recorded(int steps, const std::string& error = "") {
  Pipeline pipeline(2, "interleaved");
  const auto tail = add_tail(pipeline);
  const auto body = [&](base::Microbatch) {
    const auto y = tensor_of(pipeline.job(0).call(tail, at::ones({3}, at::kDouble).set_requires_grad(true)));
    if (!error.empty()) throw base::UsageError(error);
    pipeline.job(0).backward({y.sum()}, {}, 1.0);
    return Value(std::int64_t(1));
  };
  for (int rank = 0; rank < 2; ++rank) pipeline.recorder(rank).start({.ranks = {{.rank = rank}}});
  for (int step = 0; step < steps; ++step) {
    for (const auto& outcome : pipeline.step(kMicrobatches, body)) {
      EXPECT_THAT(message_of(outcome.error), testing::HasSubstr(error));
    }
  }
  return {pipeline.recorder(0).stop(), pipeline.recorder(1).stop()};
}

std::vector<Event> events(const Timeline& timeline, What what) {
  std::vector<Event> found;
  std::ranges::copy_if(timeline.ranks.at(0).events, std::back_inserter(found),
                       [what](const Event& event) { return event.what == what; });
  return found;
}

// The microbatches of which rank and step computed `name`.
std::set<std::int64_t> microbatches(const Timeline& timeline, What what, std::int64_t step, const std::string& name) {
  std::set<std::int64_t> found;
  for (const auto& event : events(timeline, what)) {
    if (event.step == step && event.name == name) found.insert(event.microbatch);
  }
  return found;
}

TEST(Timeline, HasTheForwardAndTheBackwardOfEachMicrobatchAndModuleOnItsRank) {
  const auto ranks = recorded(2);
  const std::set<std::int64_t> all{0, 1, 2};
  for (std::int64_t step = 0; step < 2; ++step) {
    for (const auto what : {What::kForward, What::kBackward}) {
      EXPECT_EQ(microbatches(ranks[0], what, step, ""), all);
      EXPECT_EQ(microbatches(ranks[1], what, step, "tail"), all);
    }
  }
  EXPECT_EQ(ranks[1].ranks.at(0).rank, 1);
  EXPECT_EQ(ranks[1].ranks.at(0).leader, 0);
}

TEST(Timeline, ARankComputesOneThingAtATimeAndInsideItsSteps) {
  for (const auto& rank : recorded(3)) {
    const auto steps = events(rank, What::kStep);
    ASSERT_EQ(steps.size(), 3);
    auto turns = events(rank, What::kForward);
    std::ranges::copy(events(rank, What::kBackward), std::back_inserter(turns));
    std::ranges::sort(turns, {}, &Event::begin_ns);
    for (std::size_t i = 0; i < turns.size(); ++i) {
      EXPECT_LE(turns[i].begin_ns, turns[i].end_ns);
      if (i > 0) {
        EXPECT_LE(turns[i - 1].end_ns, turns[i].begin_ns);
      }
      const auto& step = steps.at(turns[i].step);
      EXPECT_LE(step.begin_ns, turns[i].begin_ns);
      EXPECT_LE(turns[i].end_ns, step.end_ns);
    }
    EXPECT_GE(events(rank, What::kMemory).size(), turns.size());
  }
}

TEST(Timeline, EachMessageLeavesOnceAndArrivesOnceAfterwards) {
  const auto ranks = recorded(4);
  const auto all = [&](const Timeline& rank, What what) {  // but the last step's: what ends it may still be arriving
    auto found = events(rank, what);
    std::erase_if(found, [](const Event& event) { return event.step == 3; });
    return found;
  };
  std::map<std::uint64_t, Event> sent;
  int arrivals = 0;
  for (const auto& rank : ranks) {
    for (const auto& event : all(rank, What::kSend)) {
      EXPECT_TRUE(sent.emplace(event.message, event).second) << event.name;
    }
  }
  for (const auto& rank : ranks) {
    for (const auto& event : all(rank, What::kReceive)) {
      ASSERT_TRUE(sent.contains(event.message)) << event.name;
      const auto& sending = sent.at(event.message);
      EXPECT_EQ(sending.name, event.name);
      EXPECT_EQ(sending.bytes, event.bytes);
      EXPECT_EQ(sending.peer, rank.ranks.at(0).rank);
      EXPECT_LE(sending.begin_ns, event.begin_ns);
      ++arrivals;
    }
  }
  EXPECT_EQ(arrivals, sent.size());
  // A request and an answer per forward and backward, and the end.
  EXPECT_GE(arrivals, 3 * (4 * kMicrobatches + 1));
}

TEST(Timeline, AWaitSaysForWhat) {
  const auto waits = events(recorded(1)[0], What::kWait);
  EXPECT_GE(waits.size(), 2);  // of the first microbatch, at least: others may be like it
  for (const auto& wait : waits) {
    EXPECT_THAT(wait.name, testing::ContainsRegex("(forward|backward) of tail on rank 1"));
    EXPECT_LE(wait.begin_ns, wait.end_ns);
  }
}

TEST(Timeline, AStepInTheCallingThreadHasItsMicrobatchesToo) {
  Pipeline pipeline(1, "simple");
  auto& job = pipeline.job(0);
  pipeline.recorder(0).start({.ranks = {RankRecord()}});
  for (int step = 0; step < 2; ++step) job.run_step_here({kMicrobatches, [](base::Microbatch) { return Value(); }});
  EXPECT_THROW(job.run_step_here({1, [](base::Microbatch) -> Value { throw base::UsageError("on purpose"); }}),
               base::UsageError);
  const auto rank = pipeline.recorder(0).stop();
  EXPECT_EQ(events(rank, What::kStep).size(), 3);
  EXPECT_EQ(microbatches(rank, What::kForward, 1, ""), (std::set<std::int64_t>{0, 1, 2}));
}

TEST(Timeline, WhereNobodyAskedNothingIsRecorded) {
  Pipeline pipeline(1, "simple");
  pipeline.step(2, [](base::Microbatch) { return Value(std::int64_t(1)); });
  EXPECT_TRUE(pipeline.recorder(0).stop().ranks.at(0).events.empty());
}

TEST(Timeline, OneInsideAnotherIsRefused) {
  session::Session session({}, {}, {});
  session.start_timeline();
  EXPECT_THROW(session.start_timeline(), base::UsageError);
}

TEST(Timeline, AStepThatFailsHasItsEndToo) {
  for (const auto& rank : recorded(2, "on purpose")) EXPECT_EQ(events(rank, What::kStep).size(), 2);
}

TEST(Timeline, AStepThatFailsLeavesItsPartAtOnce) {
  const observe::TempFolder folder;
  Pipeline pipeline(1, "simple");
  pipeline.recorder(0).start_part(folder / "part", {.ranks = {RankRecord()}});
  pipeline.step(1, [](base::Microbatch) -> Value { throw base::UsageError("on purpose"); });
  EXPECT_EQ(events(observe::read_part(folder / "part"), What::kStep).size(), 1);
}

TEST(Totals, AreOfTheStepsSinceTheLastTime) {
  Pipeline pipeline(1, "simple");
  auto& recorder = pipeline.recorder(0);
  recorder.start_counting();
  pipeline.step(2, [](base::Microbatch) { return Value(at::ones({64, 64}).mm(at::ones({64, 64}))); });
  const auto totals = recorder.take_totals();
  EXPECT_GT(totals.compute_ns, 0);
  EXPECT_GE(totals.step_ns, totals.compute_ns);
  EXPECT_GT(totals.peak_bytes, 0);
  EXPECT_EQ(recorder.take_totals().step_ns, 0);
}

TEST(Timeline, OfASessionIsAFile) {
  const observe::TempFolder folder;
  session::Session session({}, {}, {});
  session.start_timeline();
  session.job().run_step({1, [](base::Microbatch) { return Value(std::int64_t(1)); }, [] {}});
  EXPECT_THAT(session::write_timeline(session, folder / "timeline.json"), testing::HasSubstr("timeline of 1 step"));
  EXPECT_EQ(events(observe::read_file(folder / "timeline.json"), What::kStep).size(), 1);
}

// The timeline that rank 0 of three gathers, where the clock of rank r is ahead by `ahead[r]` and has the name
// `names[r]`.
Timeline gathered(const std::vector<std::int64_t>& ahead, const std::vector<std::string>& names) {
  messaging::Mailboxes boxes(3);
  std::vector<Timeline> results(3);
  const auto errors = boxes.run([&](int rank) {
    Timeline mine{"simple", 2, {RankRecord{.rank = rank, .events = {{.step = rank}}}}};
    const session::Clock clock{names[rank], [&, rank] { return observe::now_ns() + ahead[rank]; }};
    const base::Patience patience{std::chrono::seconds(30), nullptr};
    results[rank] = session::gather(mine, base::Rank(rank), boxes.ranks(), boxes[rank], patience, clock);
  });
  for (const auto& error : errors) EXPECT_EQ(message_of(error), "");
  EXPECT_EQ(results[1].ranks.size(), 1);
  return results[0];
}

TEST(Gathering, GivesTheFirstRankWhatAllHaveRecorded) {
  const auto timeline = gathered({0, 0, 0}, {"a", "a", "a"});
  ASSERT_EQ(timeline.ranks.size(), 3);
  EXPECT_EQ(timeline.schedule, "simple");
  for (std::int64_t rank = 0; rank < 3; ++rank) {
    EXPECT_EQ(timeline.ranks[rank].rank, rank);
    EXPECT_EQ(timeline.ranks[rank].ahead_ns, 0);
    EXPECT_EQ(timeline.ranks[rank].events.at(0).step, rank);
  }
}

TEST(Gathering, MeasuresHowFarTheClockOfAnotherMachineIsAhead) {
  constexpr std::int64_t kHour = 3'600'000'000'000, kTolerance = 1'000'000'000;
  const auto timeline = gathered({5, kHour, -kHour}, {"a", "b", "c"});
  EXPECT_NEAR(timeline.ranks.at(1).ahead_ns, kHour, kTolerance);
  EXPECT_NEAR(timeline.ranks.at(2).ahead_ns, -kHour, kTolerance);
}

}  // namespace
}  // namespace lamina::pipeline
