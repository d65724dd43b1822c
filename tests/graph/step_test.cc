// SPDX-License-Identifier: Apache-2.0
#include "lamina/graph/step.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <future>
#include <random>

#include "lamina/base/str.h"
#include "lamina/graph/current.h"
#include "tests/graph/pretended_ranks.h"
#include "tests/message_of.h"

namespace lamina::graph::testing {
namespace {

using ::testing::HasSubstr;

// Rank 1 reads what rank 0 makes.
NumberGraph two_in_a_row() {
  NumberGraph graph;
  graph.partitions = 2;
  graph.operations = {{base::Partition(0), {}, {}, {true}}, {base::Partition(1), {{0, 0}}, {}, {true}}};
  graph.results = {{1, 0}};
  return graph;
}

std::string why(const std::exception_ptr& error) {
  return message_of<base::Error>([&] { std::rethrow_exception(error); });
}

TEST(Step, ADeadlineNamesWhoWaitsForWhatOfWhom) {
  const auto graph = two_in_a_row();
  PretendedJob job(graph, {.timeout = std::chrono::milliseconds(50)});
  auto& rank = *job.ranks[1];
  const auto step = rank.border().begin(0, 1, true);
  std::promise<std::exception_ptr> failed;
  step->enter({Direction::kForward, 0, base::Microbatch(0)},
              {[](std::vector<TensorBytes>) {}, [&](std::exception_ptr error) { failed.set_value(std::move(error)); }});
  EXPECT_THAT(why(failed.get_future().get()),
              HasSubstr("step 0 of a graph: forward of level 1 (operation1 to operation1) (microbatch 0) waits for the "
                        "value of operation0 from rank 0: no answer for"));
}

TEST(Step, ADeadlineOfATurnNamesWhoHasIt) {
  NumberGraph graph;
  graph.operations = {{base::Partition(0), {}, {}, {true}}};
  graph.results = {{0, 0}};
  PretendedJob job(graph, {.timeout = std::chrono::milliseconds(50)});
  const auto step = job.ranks[0]->border().begin(0, 2, true);
  std::promise<std::exception_ptr> failed;
  step->enter({Direction::kForward, 0, base::Microbatch(0)},
              {[](std::vector<TensorBytes>) {}, [](std::exception_ptr) {}});
  step->enter({Direction::kForward, 0, base::Microbatch(1)},
              {[](std::vector<TensorBytes>) {}, [&](std::exception_ptr error) { failed.set_value(std::move(error)); }});
  EXPECT_THAT(why(failed.get_future().get()),
              HasSubstr("waits for its turn on this rank, which forward of level 0 (operation0 to operation0) "
                        "(microbatch 0) has"));
}

TEST(Step, RanksThatRunDifferentGraphsAreTold) {
  const auto graph = two_in_a_row();
  PretendedJob job(graph, {});
  job.begin();
  ValueName name{.graph = 1, .step = base::Step(0), .from = base::Rank(0)};
  job.ranks[1]->border().receive(name, {});
  EXPECT_THAT(why(job.ranks[1]->border().step()->error()),
              HasSubstr("rank 0 runs graph 1 in it, and rank 1 runs graph 0 (numbers)"));
  std::mt19937_64 draw(0);
  job.actions.run(draw);
  EXPECT_THAT(why(job.ranks[0]->border().step()->error()), HasSubstr("rank 1: step 0 of a graph: rank 0 runs graph 1"));
}

StepArguments arguments_of(std::uint64_t x) {
  return [x] { return Checksums{{"x", x}, {"y", 7}}; };
}

void run_all(PretendedJob& job) {
  std::mt19937_64 draw(0);
  job.actions.run(draw);
}

TEST(Step, AnArgumentThatDiffersIsNamedOnAllRanks) {
  PretendedJob job(two_in_a_row(), {});
  for (int i = 0; i < 2; ++i) job.ranks[i]->border().begin(0, 1, true, arguments_of(i));
  run_all(job);
  for (auto& rank : job.ranks) {
    EXPECT_THAT(why(rank->border().step()->error()), HasSubstr("argument x differs between rank 0 and rank 1"));
  }
}

TEST(Step, ArgumentsAreComparedInTheFirstStepsOfAGraphAndInEvery100th) {
  PretendedJob job(two_in_a_row(), {});
  std::vector<int> compared;
  for (int step = 0; step < 202; ++step) {
    for (auto& rank : job.ranks) {
      rank->begin([&] {
        if (rank == job.ranks[0]) compared.push_back(step);
        return Checksums{{"x", 1}};
      });
    }
    run_all(job);
    ASSERT_EQ(job.difference(), "");
    for (auto& rank : job.ranks) rank->end();
  }
  EXPECT_EQ(compared, (std::vector{0, 1, 2, 100, 200}));
}

TEST(Step, NothingGetsOutBeforeAllRanksHaveSaidTheSame) {
  NumberGraph graph;  // rank 1 has no part in it
  graph.partitions = 2;
  graph.operations = {{base::Partition(0), {}, {}, {true}}};
  graph.results = {{0, 0}};
  PretendedJob job(graph, {});
  job.ranks[0]->begin();
  run_all(job);
  EXPECT_EQ(job.ranks[0]->open_entries(), 1);
  job.ranks[1]->begin();
  run_all(job);
  EXPECT_EQ(job.difference(), "");
}

TEST(Step, ARankThatTakesNoGradientsIsToldFromOneThatDoes) {
  PretendedJob job(two_in_a_row(), {});
  for (int i = 0; i < 2; ++i) job.ranks[i]->border().begin(0, 1, /*backward=*/i == 0);
  run_all(job);
  for (auto& rank : job.ranks) {
    EXPECT_THAT(why(rank->border().step()->error()), HasSubstr("rank 0 takes gradients in it, and rank 1 takes none"));
  }
}

TEST(Step, OneThatARankDoesNotEnterFailsOnTheOthersWithItsReason) {
  for (const bool before : {false, true}) {
    PretendedJob job(two_in_a_row(), {});
    if (before) job.ranks[0]->begin();
    job.ranks[1]->border().abandon("rank 1: it could not trace");
    run_all(job);
    if (!before) job.ranks[0]->begin();
    run_all(job);
    EXPECT_EQ(why(job.ranks[0]->border().step()->error()), "rank 1: it could not trace");
    job.begin();
    run_all(job);
    EXPECT_EQ(job.difference(), "");
  }
}

// Ranks 0 and 1 of each of two copies, and what ranks with the same part share: rank 0 of both copies has pair 0.
struct TwoCopies {
  PretendedJob copies[2]{{two_in_a_row(), {}}, {two_in_a_row(), {}}};
  PretendedJob pairs[2]{{two_in_a_row(), {}}, {two_in_a_row(), {}}};

  void begin() {
    for (auto* jobs : {copies, pairs}) {
      for (int i = 0; i < 2; ++i) jobs[i].begin();
    }
    for (int copy = 0; copy < 2; ++copy) {
      for (int part = 0; part < 2; ++part) {
        fail_together(copies[copy].ranks[part]->step(), pairs[part].ranks[copy]->step());
      }
    }
  }
  void run() {
    for (auto* jobs : {copies, pairs}) {
      for (int i = 0; i < 2; ++i) run_all(jobs[i]);
    }
  }
};

TEST(Step, WhatEndsItInOneCopyEndsItInAllWhoseStepsFailTogether) {
  for (const bool in_pair : {false, true}) {
    TwoCopies job;
    job.begin();
    auto& rank = in_pair ? job.pairs[1].ranks[0] : job.copies[0].ranks[1];
    rank->step()->fail(std::make_exception_ptr(base::Error("it is broken")), GraphStep::Tell::kOthers);
    job.run();
    for (auto* jobs : {job.copies, job.pairs}) {
      for (int i = 0; i < 2; ++i) {
        for (auto& each : jobs[i].ranks) {
          EXPECT_EQ(each->open_entries(), 0);
          EXPECT_THAT(why(each->step()->error()), HasSubstr("it is broken"));
        }
      }
    }
    // Names who told it once, however long the way was.
    EXPECT_EQ(why(job.copies[1].ranks[0]->step()->error()), base::str("rank ", in_pair ? 0 : 1, ": it is broken"));
    job.begin();
    job.run();
    for (auto& copy : job.copies) EXPECT_EQ(copy.difference(), "");
  }
}

TEST(Step, OneThatHasFailedBeforeItIsTiedFailsTheOther) {
  TwoCopies job;
  for (auto& pair : job.pairs) pair.begin();
  job.pairs[0].ranks[1]->step()->fail_here();
  run_all(job.pairs[0]);
  for (auto& copy : job.copies) copy.begin();
  fail_together(job.copies[0].ranks[0]->step(), job.pairs[0].ranks[0]->step());
  EXPECT_THAT(why(job.copies[0].ranks[0]->step()->error()), HasSubstr("rank 1: step 0 of a graph: an operation"));
}

TEST(Step, OneOverCopiesAloneHasTheNextStepOfItsCopyFail) {
  PretendedJob copy(two_in_a_row(), {}), pair(two_in_a_row(), {});
  pair.begin();
  const auto kept = std::make_shared<int>();
  fail_before(pair.ranks[0]->step(), {kept, &copy.ranks[0]->border()});
  pair.ranks[0]->step()->fail(std::make_exception_ptr(base::Error("it is broken")), GraphStep::Tell::kOthers);
  run_all(copy);
  copy.ranks[1]->begin();
  run_all(copy);
  EXPECT_EQ(why(copy.ranks[1]->step()->error()), "rank 0: it is broken");
  copy.begin();
  run_all(copy);
  EXPECT_EQ(copy.difference(), "");
}

TEST(Step, ATimelineHasItsTurnsOneAfterTheOtherAndTheStepAroundThem) {
  observe::Recorder recorder;
  recorder.start({.ranks = {observe::RankRecord()}});
  NumberGraph graph;
  graph.operations = {{base::Partition(0), {}, {}, {true}}};
  graph.results = {{0, 0}};
  PretendedJob job(graph, {.microbatches = 3, .recorder = &recorder});
  for (int step = 0; step < 2; ++step) {
    job.begin();
    run_all(job);
    for (auto& rank : job.ranks) rank->end();
  }
  const auto events = recorder.stop().ranks.at(0).events;
  ASSERT_EQ(events.size(), 14U);  // a forward and a backward of each microbatch, and the step, twice
  for (std::size_t i = 0; i < events.size(); ++i) {
    const auto& event = events[i];
    EXPECT_EQ(event.step, i / 7);
    if (i % 7 == 6) {
      EXPECT_EQ(event.what, observe::What::kStep);
      EXPECT_LE(event.begin_ns, events[i - 6].begin_ns);
      EXPECT_GE(event.end_ns, events[i - 1].end_ns);
      continue;
    }
    EXPECT_EQ(event.name, "level 0 (operation0 to operation0)");
    if (i % 7 > 0) {
      EXPECT_GE(event.begin_ns, events[i - 1].end_ns);
    }
  }
  EXPECT_EQ(std::ranges::count(events, observe::What::kBackward, &observe::Event::what), 6);
}

TEST(Step, AnInterruptEndsItOnAllRanks) {
  PretendedJob job(two_in_a_row(), {});
  job.ranks[0]->border().interrupt("nothing is open");
  job.begin();
  job.ranks[0]->border().interrupt("somebody pressed Ctrl-C");
  run_all(job);
  EXPECT_EQ(why(job.ranks[0]->border().step()->error()), "somebody pressed Ctrl-C");
  EXPECT_EQ(why(job.ranks[1]->border().step()->error()), "rank 0: somebody pressed Ctrl-C");
}

TEST(Step, WhatComesForOneThatIsOverIsDropped) {
  const auto graph = two_in_a_row();
  PretendedJob job(graph, {});
  job.begin();
  std::mt19937_64 draw(0);
  job.actions.run(draw);
  for (auto& rank : job.ranks) rank->end();
  const auto memory = std::make_shared<const int>(0);
  job.ranks[1]->border().receive({.step = base::Step(0), .from = base::Rank(0)}, {.data = memory});
  EXPECT_EQ(memory.use_count(), 1);
  job.ranks[1]->border().hear_failure(base::Step(0), "too late");
  job.begin();
  job.actions.run(draw);
  EXPECT_EQ(job.difference(), "");
}

TEST(Step, OneInsideAnotherIsRefused) {
  const auto graph = two_in_a_row();
  PretendedJob job(graph, {});
  job.begin();
  EXPECT_THAT(message_of<base::UsageError>([&] { job.ranks[0]->border().begin(0, 1, true); }),
              HasSubstr("a step of a graph inside step 0"));
}

TEST(Step, AnEvaluationOfManyMicrobatchesNeedsNoBackward) {
  const auto graph = two_in_a_row();
  PretendedJob job(graph, {.active_microbatches = 1, .microbatches = 6, .backward = false});
  job.begin();
  std::mt19937_64 draw(0);
  job.actions.run(draw);
  EXPECT_EQ(job.difference(), "");
}

}  // namespace
}  // namespace lamina::graph::testing
